"""1F1B: one forward, one backward, so that few microbatches are in flight."""

from __future__ import annotations

from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules.weights import Times, check_counts, place_weights


def one_f_one_b(
    stages: int,
    microbatches: int,
    *,
    split_backward: bool = True,
    weights: str | None = None,
    times: Times | None = None,
) -> Schedule:
    """Stage r runs N-1-r forwards to warm up, then one forward and one backward in turn.

    Source: PipeDream-Flush (Narayanan et al., arXiv 2006.09503). ``weights="2bp"`` is the
    placement of 2BP (Rae, Lee and Richings, arXiv 2405.18047), ``"fill"`` is ZB-H1 (Qi et al.,
    arXiv 2401.10241): 1F1B's order of F and I, with Ws in the gaps.

    Bubble ratio for F = I = W, N stages: (N-1)/(M+N-1) with full backwards, (N-1)/(3M+N-1) split
    and M >= N, so (N-1)/(4N-1) for M = N and (N-1)/(7N-1) for M = 2N. Split, with like stages and
    either placement, each rank idles (N-1)(F+I-min(F,I,W)) for M >= N, which is ZB-H1's
    (N-1)(F+I-W) unless a W is longer than an F or I. For M < N a step takes (M+N-1)(F+I) + W.

    Activation memory of stage r: min(N-r, M) microbatches with full backwards. Split, a microbatch
    counts until its W: at most min(N, M) on every stage with ``"fill"``, 1F1B's maximum over the
    stages; up to M with ``"2bp"``.

    Args:
        stages: N >= 1.
        microbatches: M >= 1.
        split_backward: False for full backwards (B).
        weights: ``"2bp"`` runs one W after each of the last N-r Is of stage r and the rest at the
            end, ``"fill"`` (also None) one where the rank would wait.
        times: durations of (F, I, W) that ``"fill"`` is to suit, or one triple per stage (the first
            stage often has no input gradient: I = 0, and W is the whole backward); any unit.

    Raises:
        ScheduleError: a bad count, an unknown placement, or an option without an effect.
    """
    check_counts(stages=stages, microbatches=microbatches)
    return place_weights(
        "1f1b",
        [_order(stage, stages, microbatches) for stage in range(stages)],
        paced=[stages - stage for stage in range(stages)],
        limit=min(stages, microbatches),
        split_backward=split_backward,
        weights=weights,
        times=times,
    )


def _order(stage: int, stages: int, microbatches: int) -> list[Action]:
    warm_up = min(stages - 1 - stage, microbatches)
    forwards = [Action(stage, ActionKind.FORWARD, m) for m in range(microbatches)]
    backwards = [Action(stage, ActionKind.BACKWARD, m) for m in range(microbatches)]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[microbatches - warm_up :]
