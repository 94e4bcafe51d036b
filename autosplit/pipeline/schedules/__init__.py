"""The pipeline schedules by name. Each is a pure function from counts to a Schedule."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules.blocks import block_sizes, block_times, expand
from autosplit.pipeline.schedules.gpipe import gpipe
from autosplit.pipeline.schedules.naive import naive
from autosplit.pipeline.schedules.one_f_one_b import one_f_one_b
from autosplit.pipeline.schedules.weights import WEIGHTS, Times, check_counts

__all__ = ["SCHEDULES", "WEIGHTS", "ScheduleFunction", "build"]


class ScheduleFunction(Protocol):
    """What every schedule file offers."""

    def __call__(
        self,
        stages: int,
        microbatches: int,
        *,
        split_backward: bool = True,
        weights: str | None = None,
        times: Times | None = None,
    ) -> Schedule: ...


SCHEDULES: Mapping[str, ScheduleFunction] = MappingProxyType(
    {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
)
"""Every known schedule by name."""


def build(
    name: str,
    stages: int,
    microbatches: int,
    *,
    split_backward: bool = True,
    weights: str | None = None,
    times: Times | None = None,
    ranks: int | None = None,
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: a key of ``SCHEDULES``.
        stages: number of stages N >= 1.
        microbatches: number of microbatches M >= 1.
        split_backward: False for full backwards (B).
        weights: where the Ws go, one of ``WEIGHTS``; None means ``"fill"``.
        times: durations of (F, I, W) that ``"fill"`` is to suit, or one triple per stage; any
            unit. None means F = I = W.
        ranks: number of processes P from 1 to N; None means N. With fewer, each holds a contiguous
            block of stages that runs as one large stage, so bubble and activations (per stage)
            are those of P stages. The first N % P ranks hold one stage more.

    Raises:
        ScheduleError: an unknown name or placement, a bad count, or an option without an effect.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    check_counts(stages=stages, microbatches=microbatches)
    if ranks is not None:
        check_counts(ranks=ranks)
        if ranks > stages:
            raise ScheduleError(
                f"{stages} stages cannot fill {ranks} ranks: each rank needs at least one stage; "
                f"use at most {stages} ranks or cut the model into more stages"
            )
    make = functools.partial(SCHEDULES[name], split_backward=split_backward, weights=weights)
    if ranks is None or ranks == stages:
        return make(stages, microbatches, times=times)
    sizes = block_sizes(stages, ranks)
    summed = None if times is None else block_times(times, sizes)
    return expand(make(ranks, microbatches, times=summed), sizes)
