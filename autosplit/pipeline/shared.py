"""Parameters that are one in the model and copied on several stages, such as tied embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.groups import Groups, losing

Holder: TypeAlias = "tuple[int, str]"
"""A stage and the name of the parameter within it."""


class SharedParameters:
    """Keeps copies equal: same values at the start, the sum of all gradients in every step.

    Creating one is collective over all ranks.

    Args:
        shared: groups of (stage, parameter name); every group is one parameter of the model.
        modules: this rank's stages by index.
        placement: the rank of each stage.
        groups: the trainer's process groups.

    Raises:
        PipelineError: a stage or a parameter that is not there, one that is in two groups, or
            copies of different shape or dtype.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[Holder]],
        modules: Mapping[int, nn.Module],
        placement: Sequence[int],
        groups: Groups,
    ) -> None:
        _check_holders(shared, len(placement))
        self._timeout = groups.timeout
        self._duplicates: set[int] = set()
        self._members: list[_Member] = []
        found = _find(shared, modules)
        _check_alike(shared, found, groups)
        links: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for holders in shared:
            ranks = tuple(sorted({placement[stage] for stage, _ in holders}))
            if len(ranks) > 1 and ranks not in links:
                links[ranks] = groups.among(ranks)
            own = [found[stage, name] for stage, name in holders if (stage, name) in found]
            copies = list({id(copy): copy for copy in own}.values())
            if not copies:
                continue
            owner = placement[holders[0][0]]
            self._members.append(_Member(copies, owner, links.get(ranks)))
            counted = copies[1:] if groups.rank == owner else copies
            self._duplicates |= {id(copy) for copy in counted}
        self._equalise()

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether another copy of ``parameter`` stands for it where the model is counted."""
        return id(parameter) in self._duplicates

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Give every copy the sum of what is added to the copies' gradients inside.

        What was there before stays, once, so that steps can accumulate.

        Raises:
            LostPeerError: a rank that holds a copy did not take part.
        """
        before = [[copy.grad for copy in member.copies] for member in self._members]
        for member in self._members:
            for copy in member.copies:
                copy.grad = None
        yield
        for member, earlier in zip(self._members, before, strict=True):
            total = _total([copy.grad for copy in member.copies], member.copies[0])
            if member.link is not None:
                with losing("a rank that shares a parameter", self._timeout):
                    dist.all_reduce(total, group=member.link)
            for copy, grad in zip(member.copies, earlier, strict=True):
                copy.grad = total.clone() if grad is None else grad + total

    @torch.no_grad()
    def _equalise(self) -> None:
        for member in self._members:
            values = member.copies[0].detach().clone(memory_format=torch.contiguous_format)
            if member.link is not None:
                with losing("a rank that shares a parameter", self._timeout):
                    dist.broadcast(values, src=member.owner, group=member.link)
            for copy in member.copies:
                copy.copy_(values)


@dataclass(frozen=True)
class _Member:
    """This rank's part in one shared parameter; ``link`` is None if no other rank has a copy."""

    copies: list[nn.Parameter]
    owner: int
    link: dist.ProcessGroup | None


def _total(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """The sum of gradients, contiguous, zeros without any."""
    total = torch.zeros_like(like, memory_format=torch.contiguous_format)
    for gradient in gradients:
        if gradient is not None:
            total += gradient
    return total


def _check_holders(shared: Sequence[Sequence[Holder]], stages: int) -> None:
    seen: set[Holder] = set()
    for holders in shared:
        if len(holders) < 2:
            raise PipelineError(
                f"a shared parameter needs two or more holders (stage, name); got {list(holders)}"
            )
        for stage, name in holders:
            if not 0 <= stage < stages:
                raise PipelineError(
                    f"shared parameter {name!r} is said to be on stage {stage}; "
                    f"the stages are 0 to {stages - 1}"
                )
            if (stage, name) in seen:
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} is named twice in shared_parameters; "
                    "put all its copies into one group"
                )
            seen.add((stage, name))


def _find(
    shared: Sequence[Sequence[Holder]], modules: Mapping[int, nn.Module]
) -> dict[Holder, nn.Parameter]:
    """This rank's holders."""
    found = {}
    for stage, module in modules.items():
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in (name for holders in shared for at, name in holders if at == stage):
            if name not in parameters:
                raise PipelineError(
                    f"stage {stage} has no parameter {name!r} to share; it has: "
                    f"{', '.join(parameters) or 'none'}"
                )
            found[stage, name] = parameters[name]
    return found


def _check_alike(
    shared: Sequence[Sequence[Holder]], found: Mapping[Holder, nn.Parameter], groups: Groups
) -> None:
    if not shared:
        return
    mine = {holder: f"{list(p.shape)} {p.dtype}" for holder, p in found.items()}
    forms = {holder: form for part in groups.gather(mine) for holder, form in part.items()}
    for holders in shared:
        if len({forms[stage, name] for stage, name in holders}) > 1:
            listed = "; ".join(f"{name!r} of stage {s}: {forms[s, name]}" for s, name in holders)
            raise PipelineError(f"shared parameters must have one shape and dtype; got {listed}")
