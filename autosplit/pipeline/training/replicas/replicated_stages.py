"""Stages replicated on two ranks, and what would let the replicas diverge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.torch_internals.state import versions


class ReplicatedStages:
    """This rank's stages that another rank holds a replica of.

    Each copy runs half of the microbatches. Parameters stay alike because both get the sum of the
    gradients (see ``shared``) and their optimizers do the same with it. A buffer that the forward
    writes would hold the statistics of one half, so none may be written. Creating one is collective
    over all ranks.

    Args:
        modules: this rank's stages by index.
        schedule: says who holds which stage.
        groups: the trainer's process groups.

    Raises:
        PipelineError: a stage is not alike on its two ranks.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], schedule: Schedule, groups: Groups
    ) -> None:
        self._modules = {
            stage: module for stage, module in modules.items() if len(schedule.holders(stage)) > 1
        }
        if schedule.mirror is not None:
            _check_alike(self._modules, groups)

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Refuse what writes into a buffer inside.

        Raises:
            PipelineError: names the buffer.
        """
        before = self._buffers()
        marks = versions(before.values())
        yield
        after = self._buffers()
        for (at, buffer), mark in zip(before.items(), marks, strict=True):
            if after.get(at) is not buffer or versions([buffer]) != (mark,):
                stage, name = at
                raise PipelineError(
                    f"the forward of stage {stage} writes its buffer {name!r}, and each of the two "
                    "copies of the stage sees half of the microbatches: neither would have the "
                    "statistics of all. Take a schedule with one copy of each stage, such as "
                    "'dualpipe-v', or a layer that keeps none, such as nn.GroupNorm"
                )

    def _buffers(self) -> dict[tuple[int, str], Tensor]:
        return {
            (stage, name): buffer
            for stage, module in self._modules.items()
            for name, buffer in module.named_buffers()
        }


def _check_alike(modules: Mapping[int, nn.Module], groups: Groups) -> None:
    mine = {
        stage: [f"{name}: {_form(tensor)}" for name, tensor in _named(module)]
        for stage, module in modules.items()
    }
    first: dict[int, tuple[int, list[str]]] = {}
    for number, forms in enumerate(groups.gather(mine)):
        rank = groups.members[number]
        for stage, form in forms.items():
            other, expected = first.setdefault(stage, (rank, form))
            if form != expected:
                here = next((each for each in form if each not in expected), "nothing more")
                there = next((each for each in expected if each not in form), "nothing more")
                raise PipelineError(
                    f"stage {stage} must be built alike on the ranks {other} and {rank}, which "
                    f"hold a copy each: rank {other} has {there}, rank {rank} has {here}"
                )


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _form(tensor: Tensor) -> str:
    trains = ", trained" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{trains}"
