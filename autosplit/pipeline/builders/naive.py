"""Naive model parallelism: one microbatch at a time."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import ScheduleTemplate, backward, forward


def naive(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Each microbatch goes forward and backward through all stages before the next one starts.

    Source: the baseline of 2BP (Rae, Lee and Richings, arXiv 2405.18047); with one microbatch it
    is plain model parallelism.

    Bubble ratio for F = I = W, N stages, any M: (N-1)/N with full backwards, 2(N-1)/(2N+1) with
    ``weights="2bp"``. ``"fill"`` runs the Ws of all but the last microbatch while other stages
    work: 2NM + 1 units of time for N >= 2, where ``"2bp"`` takes 2NM + M.

    Activation memory per stage: one microbatch with full backwards. Split, a microbatch counts
    until its W: all M with ``"2bp"``, at most two with ``"fill"`` for F = I = W and N >= 2.
    """
    rows = tuple(
        tuple(
            make(stage, microbatch)
            for microbatch in range(microbatches)
            for make in (forward, backward)
        )
        for stage in range(ranks)
    )
    return ScheduleTemplate(
        rows, tuple(range(ranks)), budgets=(microbatches,) * ranks, paced=(0,) * ranks
    )
