"""V-Min: the least activations of the V-shapes, a third of 1F1B's."""

from __future__ import annotations

from autosplit.pipeline.builders.placement.template import ScheduleTemplate

from .v_shape import v_shape


def v_min(ranks: int, microbatches: int) -> ScheduleTemplate:
    """The V-shape with all rank-to-rank distances 1.

    Source: V-Min of Qi et al., arXiv 2405.15362.

    Bubble for F = I = W of two like stages a rank, P ranks and M >= P: each rank idles
    4(P-1)F + F if 3 divides P and F less than 4(P-1)F if not, where F is that of one stage: two
    thirds of 1F1B's bubble, which is 6(P-1)F. With other ratios of F, I and W ranks also wait for
    each other within every microbatch, so that the bubble grows with M.

    Activation memory: at most 2 ceil((P+2)/3) pairs of a stage and a microbatch between F and W on
    every rank, where 1F1B's first has 2P: a third of it for many ranks.
    """
    return v_shape(ranks, microbatches, (1, 1, 1, 1))
