"""``AutogradStage``: a stage under plain autograd, with which split stages are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.pipeline.engine.partial_stage import PartialStage
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule


class AutogradStage(PartialStage):
    """A module as a stage without graphs. I is the whole backward, and W computes nothing.

    Args:
        module: the stage's module.
        index: the stage's index in the pipeline.
        dtype: the dtype in which gradients are summed; None for the dtype of each gradient.
    """

    def __init__(self, module: nn.Module, index: int, dtype: torch.dtype | None) -> None:
        self._set_module(module, index, dtype)
        self._anchor = self._root

    def _call(self, args: tuple[Tensor, ...]) -> Any:
        return self._module(*args)

    def _enter(self, inputs: Sequence[Tensor]) -> Any:
        self._needs_grad = [t.is_floating_point() or t.is_complex() for t in inputs]
        return super()._enter(inputs)

    def _check_attributes(self, module: nn.Module) -> None:
        """Accept tensors in attributes, as split stages do."""


def with_full_backwards(schedule: Schedule) -> Schedule:
    """The schedule with B in place of each I, and without W and moves."""
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    kinds = {forward: forward, ActionKind.BACKWARD_INPUT: backward, backward: backward}
    rows = [
        tuple([replace(action, kind=kinds[action.kind]) for action in row if action.kind in kinds])
        for row in schedule.ranks
    ]
    return replace(schedule, ranks=tuple(rows), split_backward=False)
