"""Tied parameters, such as embeddings: one parameter of the model that several stages hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.torch_internals.autograd import has_tensor_hooks
from autosplit.torch_internals.dtensor import local_tensor

from .reductions import Member, buckets_of
from .stage_copies import adopt, form_of

Holder: TypeAlias = "tuple[int, str]"
"""A stage and the name of the parameter within it."""


class SharedParameters:
    """Keeps copies equal: same values at the start, the sum of all gradients in every step.

    Creating one is collective over all ranks.

    Args:
        shared: groups of (stage, parameter name); every group is one parameter of the model.
        modules: this rank's stages by index.
        schedule: says which ranks hold which stage.
        groups: the trainer's process groups.

    Attributes:
        reductions: give every copy the sum of what is added to the copies' gradients.

    Raises:
        PipelineError: a stage or a parameter that is not there, one that is in two groups, or
            copies of different shape or dtype or of which some are frozen.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[Holder]],
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        groups: Groups,
    ) -> None:
        _check_holders(shared, schedule.stages)
        self._named = found = _find(shared, modules)
        _check_alike(shared, found, groups)
        self._duplicates: set[int] = set()
        # The same calls on all ranks: one link for all that the same ranks hold together.
        links: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        trained = []
        for holders in shared:
            owner = schedule.placement[holders[0][0]]
            ranks = tuple(sorted({schedule.placement[stage] for stage, _ in holders}))
            if ranks not in links:
                links[ranks] = groups.among(ranks) if len(ranks) > 1 else None
            here = [found[stage, name] for stage, name in holders if (stage, name) in found]
            own = {id(each): each for each in here}
            if not own:
                continue
            first, *others = own.values()
            adopt([first], groups.members[owner], links[ranks], groups, _OTHERS)
            with torch.no_grad():
                for copy in others:
                    local_tensor(copy).copy_(local_tensor(first))
            self._duplicates.update(map(id, others if groups.rank == owner else own.values()))
            trained += [Member([first, *others], links[ranks])] if first.requires_grad else []
        self.reductions = buckets_of(trained, groups.losing)

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether another copy of ``parameter`` stands for it where the model is counted."""
        return id(parameter) in self._duplicates

    def check(self) -> None:
        """Refuse hooks, which would see the share of one stage where autograd shows the sum.

        Raises:
            PipelineError: names a parameter that has one.
        """
        for (stage, name), parameter in self._named.items():
            if has_tensor_hooks([parameter]):
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} has a hook of register_hook, and other "
                    "stages hold it too: no stage has the gradient that it should see. Let "
                    "optimizer.register_step_pre_hook change the gradient, on each rank that holds "
                    "it"
                )


_OTHERS = "a rank that shares a parameter"


def union_of_groups(
    found: Sequence[Sequence[Holder]], given: Sequence[Sequence[Holder]]
) -> tuple[Sequence[Holder], ...]:
    """The groups that were found in the model and those that the user gave, equal ones once."""
    said = [set(map(tuple, holders)) for holders in given]
    return (*(holders for holders in found if set(holders) not in said), *given)


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
    mine = {holder: form_of(parameter) for holder, parameter in found.items()}
    forms = {holder: form for part in groups.gather(mine) for holder, form in part.items()}
    for holders in shared:
        if len({forms[stage, name] for stage, name in holders}) > 1:
            listed = "; ".join(f"{name!r} of stage {s}: {forms[s, name]}" for s, name in holders)
            raise PipelineError(
                "shared parameters must have one shape and dtype and be all trained or all frozen; "
                f"got {listed}"
            )
