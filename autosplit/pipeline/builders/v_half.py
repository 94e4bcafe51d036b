"""V-Half: half of 1F1B's activations for about half of its bubble."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import ScheduleTemplate

from .v_shape import v_shape


def v_half(ranks: int, microbatches: int) -> ScheduleTemplate:
    """The V-shape with rank-to-rank distances 1, 2, 1 and 2.

    Source: V-Half of Qi et al., arXiv 2405.15362.

    Bubble for F = I = W of two like stages a rank, P ranks and M >= P: each rank idles 3(P-1)F for
    even P and F less for odd P >= 3, where F is that of one stage: half of 1F1B's bubble, which is
    6(P-1)F. Other ratios, and smaller M, leave more.

    Activation memory: at most 2(floor(P/2)+1) pairs of a stage and a microbatch between F and W on
    every rank, where 1F1B's first has 2P: half of it for many ranks.
    """
    return v_shape(ranks, microbatches, (1, 2, 1, 2))
