"""ZB-H2: a deeper warm-up and steps that overlap, so that hardly a gap is left."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import ScheduleTemplate

from .one_f_one_b import alternating


def zb_h2(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Stage r warms up with 2(N-r)-1 forwards; a rank that is done starts the next step.

    Source: ZB-H2 of Zero Bubble (Qi et al., arXiv 2401.10241). Crossing the step needs an
    optimizer that does not wait for all ranks: it steps at once and is undone should a check of
    the whole gradient say so afterwards (the paper's post-validation).

    Bubble for like stages and M >= 2N-1: each rank idles (N-1)(F+I-2W) between its own first and
    last action, if no W is longer than an F or an I; nothing for F = I = W.

    Activation memory: at most min(2N-1, M) microbatches between F and W on every stage.
    """
    rows = tuple(
        alternating(stage, microbatches, warm_up=2 * (ranks - 1 - stage)) for stage in range(ranks)
    )
    return ScheduleTemplate(
        rows,
        tuple(range(ranks)),
        budgets=(min(2 * ranks - 1, microbatches),) * ranks,
        crosses_step=True,
    )
