"""ZB-H1: 1F1B with the weight gradients in its gaps."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import ScheduleTemplate

from .one_f_one_b import one_f_one_b


def zb_h1(ranks: int, microbatches: int) -> ScheduleTemplate:
    """F and I in the order of 1F1B, and a W wherever a rank would wait.

    Source: ZB-H1 of Zero Bubble (Qi et al., arXiv 2401.10241). The same as 1F1B with
    ``weights="fill"``, under the name by which the literature knows it.

    Bubble for like stages and M >= N: each rank idles (N-1)(F+I-W), if no W is longer than an F
    or an I; a third of 1F1B's (N-1)(F+I+W) for F = I = W.

    Activation memory: at most min(N, M) microbatches between F and W on every stage, the maximum
    of 1F1B over its stages.
    """
    return one_f_one_b(ranks, microbatches)
