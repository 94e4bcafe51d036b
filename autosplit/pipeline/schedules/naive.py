"""Naive model parallelism: one microbatch at a time."""

from __future__ import annotations

from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules.weights import Times, check_counts, place_weights


def naive(
    stages: int,
    microbatches: int,
    *,
    split_backward: bool = True,
    weights: str | None = None,
    times: Times | None = None,
) -> Schedule:
    """Each microbatch goes forward and backward through all stages before the next one starts.

    Source: the baseline of 2BP (Rae, Lee and Richings, arXiv 2405.18047); with one microbatch it
    is plain model parallelism.

    Bubble ratio for F = I = W, N stages, any M: (N-1)/N with full backwards, 2(N-1)/(2N+1) with
    ``weights="2bp"``. ``"fill"`` runs the Ws of all but the last microbatch while other stages
    work: 2NM + 1 units of time for N >= 2, where ``"2bp"`` takes 2NM + M.

    Activation memory per stage: one microbatch with full backwards. Split, a microbatch counts
    until its W: all M with ``"2bp"``, at most two with ``"fill"`` for F = I = W and N >= 2.

    Args:
        stages: N >= 1.
        microbatches: M >= 1.
        split_backward: False for full backwards (B).
        weights: ``"2bp"`` runs all Ws at the end, ``"fill"`` (also None) where the rank would
            wait, with F and I in the order they had.
        times: durations of (F, I, W) that ``"fill"`` is to suit, or one triple per stage; any unit.

    Raises:
        ScheduleError: a bad count, an unknown placement, or an option without an effect.
    """
    check_counts(stages=stages, microbatches=microbatches)
    orders = [
        [
            Action(stage, kind, microbatch)
            for microbatch in range(microbatches)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        ]
        for stage in range(stages)
    ]
    return place_weights(
        "naive",
        orders,
        paced=[0] * stages,
        limit=microbatches,
        split_backward=split_backward,
        weights=weights,
        times=times,
    )
