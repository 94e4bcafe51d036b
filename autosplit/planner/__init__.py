"""From a whole model to balanced stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autosplit.errors import PlanError
from autosplit.planner.stages import Partition, cut
from autosplit.planner.whole import WholeModel

__all__ = ["Partition", "WholeModel", "cut", "partition"]


def partition(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    cut_at: Sequence[str] | None = None,
) -> Partition:
    """Cut a model into stages.

    Args:
        model: what to cut; its parameters may be on the meta device.
        args: example positional inputs of one microbatch, a tuple or one tensor.
        kwargs: example keyword inputs.
        stages: how many stages.
        cut_at: the modules with which the stages after the first begin, as ``model.layers.8``.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: more stages than blocks, or a name in ``cut_at`` that cannot be cut at.
    """
    if cut_at is not None:
        if stages not in (None, len(cut_at) + 1):
            raise PlanError(
                f"cut_at has {len(cut_at)} names, which gives {len(cut_at) + 1} stages, but "
                f"stages={stages}"
            )
        whole = WholeModel.capture(model, args, kwargs).divided(cut_at)
        return cut(whole, [whole.start(name) for name in cut_at])
    if stages is None:
        raise PlanError("say how many stages: stages=N, or where they begin: cut_at=[...]")
    whole = WholeModel.capture(model, args, kwargs)
    count = len(whole.blocks)
    if not 1 <= stages <= count:
        raise PlanError(
            f"{type(model).__name__} has blocks for 1 to {count} stages, got stages={stages}"
        )
    return cut(whole, [round(count * stage / stages) for stage in range(1, stages)])
