"""The pipeline schedules by name, and which options each of them admits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autosplit.pipeline.builders.placement.template import ScheduleTemplate
from autosplit.pipeline.builders.placement.weights import WEIGHTS

from .chimera import chimera
from .dual_pipe import dual_pipe, dual_pipe_v
from .gpipe import gpipe
from .interleaved import interleaved
from .naive import naive
from .one_f_one_b import one_f_one_b
from .v_half import v_half
from .v_min import v_min
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zb_v import zb_v


@dataclass(frozen=True)
class Family:
    """One kind of schedule.

    Attributes:
        make: ``make(ranks, microbatches)`` gives the order of F and B; where ``chunks`` is None,
            ``make(ranks, microbatches, chunks)``.
        chunks: how many stages each rank holds apart from each other; None: any number from 2 on.
        weights: the placements of W that it admits, the default last; () if it places its own.
        fused: whether it can also run with full backwards.
        copies: of every stage.
    """

    make: Callable[..., ScheduleTemplate]
    chunks: int | None = 1
    weights: tuple[str, ...] = WEIGHTS
    fused: bool = True
    copies: int = 1


SCHEDULES: Mapping[str, Family] = MappingProxyType(
    {
        "naive": Family(naive),
        "gpipe": Family(gpipe),
        "1f1b": Family(one_f_one_b),
        "interleaved": Family(interleaved, chunks=None, weights=("fill",)),
        "zb-h1": Family(zb_h1, weights=("fill",), fused=False),
        "zb-h2": Family(zb_h2, weights=("fill",), fused=False),
        "zb-v": Family(zb_v, chunks=2, weights=("fill",), fused=False),
        "v-half": Family(v_half, chunks=2, weights=("fill",), fused=False),
        "v-min": Family(v_min, chunks=2, weights=("fill",), fused=False),
        "dualpipe-v": Family(dual_pipe_v, chunks=2, weights=(), fused=False),
        "dualpipe": Family(dual_pipe, weights=(), fused=False, copies=2),
        "chimera": Family(chimera, weights=("fill",), copies=2),
    }
)
"""Every known schedule by name."""
