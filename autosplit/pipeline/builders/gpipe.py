"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import ScheduleTemplate, backward, forward


def gpipe(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Every microbatch goes forward before the first one goes backward.

    Source: GPipe (Huang et al., arXiv 1811.06965), with the backwards oldest microbatch first.
    The split placement is that of 2BP (Rae, Lee and Richings, arXiv 2405.18047).

    Bubble ratio for F = I = W, N stages: (N-1)/(M+N-1) with full backwards, 2(N-1)/(3M+2(N-1))
    split; for M = N that is (N-1)/(2N-1) and 2(N-1)/(5N-2). Both placements of W give the same
    order while all stages are alike, for then the Is arrive without a gap.

    Activation memory per stage: all M microbatches. Split, what a W needs stays until the end.
    """
    rows = tuple(
        tuple(
            make(stage, microbatch)
            for make in (forward, backward)
            for microbatch in range(microbatches)
        )
        for stage in range(ranks)
    )
    return ScheduleTemplate(
        rows, tuple(range(ranks)), budgets=(microbatches,) * ranks, paced=(0,) * ranks
    )
