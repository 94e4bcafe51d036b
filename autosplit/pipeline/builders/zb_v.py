"""ZB-V: two stages a rank in a V, hardly a gap, and the activations of 1F1B."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import ScheduleTemplate

from .v_shape import v_shape


def zb_v(ranks: int, microbatches: int) -> ScheduleTemplate:
    """The V-shape with rank-to-rank distances 4, 2, 4 and 2.

    Source: ZB-V of Zero Bubble (Qi et al., arXiv 2401.10241, section 6), as V-ZB of arXiv
    2405.15362.

    Bubble for F = I = W of two like stages a rank, P ranks and M >= P: each rank idles (P-1)F,
    where F is that of one stage: the time until the last rank has work at all, and a sixth of
    1F1B's bubble.

    Activation memory: at most 2P pairs of a stage and a microbatch between F and W on every rank,
    as much as 1F1B on its first.
    """
    return v_shape(ranks, microbatches, (4, 2, 4, 2))
