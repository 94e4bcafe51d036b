"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules.weights import Times, check_counts, place_weights


def gpipe(
    stages: int,
    microbatches: int,
    *,
    split_backward: bool = True,
    weights: str | None = None,
    times: Times | None = None,
) -> Schedule:
    """Every microbatch goes forward before the first one goes backward.

    Source: GPipe (Huang et al., arXiv 1811.06965), with the backwards oldest microbatch first.
    The split placement is that of 2BP (Rae, Lee and Richings, arXiv 2405.18047).

    Bubble ratio for F = I = W, N stages: (N-1)/(M+N-1) with full backwards, 2(N-1)/(3M+2(N-1))
    split; for M = N that is (N-1)/(2N-1) and 2(N-1)/(5N-2). Both placements of W give the same
    order while all stages are alike, for then the Is arrive without a gap.

    Activation memory per stage: all M microbatches. Split, what a W needs stays until the end.

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
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for microbatch in range(microbatches)
        ]
        for stage in range(stages)
    ]
    return place_weights(
        "gpipe",
        orders,
        paced=[0] * stages,
        limit=microbatches,
        split_backward=split_backward,
        weights=weights,
        times=times,
    )
