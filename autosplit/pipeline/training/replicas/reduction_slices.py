"""Into how many slices W is cut so that the first gradients are reduced while others are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from autosplit.errors import SplitError
from autosplit.passes.errors import SliceCountError
from autosplit.pipeline.engine.stages import SplitStage, TrainableStage
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

_MOST = 8
"""Slices: what is left to be reduced behind the last is an eighth then."""


@dataclass(frozen=True)
class SlicedByReductions:
    """Makes stages as ``factory`` does, with a number of slices for each.

    Attributes:
        factory: whose other options hold.
        counts: slices by stage; one where nothing is said.
    """

    factory: SplitStage
    counts: Mapping[int, int]

    def __call__(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """A stage for ``module(*args)``, of as many slices as W can be cut into; see
        ``StageFactory``.
        """
        count = self.counts.get(index, 1)
        try:
            return replace(self.factory, slices=count)(module, args, index=index)
        except SplitError as error:  # of a small stage
            if not isinstance(error.__cause__, SliceCountError):
                raise
            most = error.__cause__.most
        return replace(self.factory, slices=most)(module, args, index=index)


def slices_by_stage(schedule: Schedule, rank: int, reductions: Mapping[int, int]) -> dict[int, int]:
    """How many slices pay for the stages of a rank.

    Only those of the stage whose W is the rank's last action: reductions of others have Ws behind
    them already. Nothing leaves earlier than the first of its reductions is complete, so there are
    no more slices than reductions.

    Args:
        schedule: that is run.
        rank: of the pipeline.
        reductions: by stage, in how many its gradients are reduced.
    """
    row = [action for action in schedule.ranks[rank] if action.kind.is_compute]
    if not row or row[-1].kind is not ActionKind.BACKWARD_WEIGHT:
        return {}
    stage = row[-1].stage
    count = min(_MOST, reductions.get(stage, 1))
    return {stage: count} if count > 1 else {}
