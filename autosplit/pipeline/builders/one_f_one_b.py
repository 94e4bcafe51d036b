"""1F1B: one forward, one backward, so that few microbatches are in flight."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import Row, ScheduleTemplate, backward, forward


def one_f_one_b(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Stage r runs N-1-r forwards to warm up, then one forward and one backward in turn.

    Source: PipeDream-Flush (Narayanan et al., arXiv 2006.09503). ``weights="2bp"`` is the
    placement of 2BP (Rae, Lee and Richings, arXiv 2405.18047): one W after each of the last N-r
    Is of stage r. ``"fill"`` is ZB-H1, see ``zb_h1``.

    Bubble ratio for F = I = W, N stages: (N-1)/(M+N-1) with full backwards, (N-1)/(3M+N-1) split
    and M >= N, so (N-1)/(4N-1) for M = N and (N-1)/(7N-1) for M = 2N. Split, with like stages and
    either placement, each rank idles (N-1)(F+I-min(F,I,W)) for M >= N, which is ZB-H1's
    (N-1)(F+I-W) unless a W is longer than an F or I. For M < N a step takes (M+N-1)(F+I) + W.

    Activation memory of stage r: min(N-r, M) microbatches with full backwards. Split, a microbatch
    counts until its W: at most min(N, M) on every stage with ``"fill"``, 1F1B's maximum over the
    stages; up to M with ``"2bp"``.
    """
    return ScheduleTemplate(
        tuple(
            alternating(stage, microbatches, warm_up=ranks - 1 - stage) for stage in range(ranks)
        ),
        tuple(range(ranks)),
        budgets=(min(ranks, microbatches),) * ranks,
        paced=tuple(ranks - stage for stage in range(ranks)),
    )


def alternating(stage: int, microbatches: int, *, warm_up: int) -> Row:
    """``warm_up`` forwards, then one forward and one backward in turn, then what is left."""
    warm_up = min(warm_up, microbatches)
    forwards = [forward(stage, m) for m in range(microbatches)]
    backwards = [backward(stage, m) for m in range(microbatches)]
    order = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return (*order, *backwards[microbatches - warm_up :])
