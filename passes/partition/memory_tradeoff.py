"""The cost of a memory setting: saved and deferred bytes, deferred FLOPs, recomputed operators."""

from __future__ import annotations

import dataclasses

from torch import fx

from ..analysis.aliasing import distinct_bytes
from ..analysis.operator_cost import duration, flops
from ..graph import calls
from ..memory_policy import Memory
from .multiplier_search import best_division, recompute_time, run_counts, weight_work
from .reachability import Reachability


@dataclasses.dataclass(frozen=True)
class MemoryTradeoff:
    """The cost of one microbatch under a memory setting.

    Attributes:
        name: of the setting.
        saved: bytes that F leaves, distinct storage.
        deferred: bytes that I leaves for W, likewise.
        early_flops: floating-point operations of weight gradients that I does.
        late_flops: floating-point operations of weight gradients that W does.
        recomputed: operators that run more than once, views not counted.
        time: estimated time of recomputation, as a share of the step's.
    """

    name: str
    saved: int
    deferred: int
    early_flops: int
    late_flops: int
    recomputed: int
    time: float


def memory_tradeoff(graph: fx.Graph, memory: Memory) -> MemoryTradeoff:
    """The cost of dividing a joint graph under a memory setting.

    Raises:
        BudgetError: a budget cannot be met.
    """
    reach = Reachability.of(graph, late_input=memory.late_input)
    regions = best_division(graph, reach, memory)
    work = weight_work(reach)
    late = sum(map(flops, work & regions.weight.runs))
    counts = run_counts(regions, reach)
    step = sum(map(duration, calls(graph)))
    return MemoryTradeoff(
        memory.name,
        saved=distinct_bytes(regions.saved),
        deferred=distinct_bytes(regions.deferred),
        early_flops=sum(map(flops, work)) - late,
        late_flops=late,
        recomputed=sum(count - 1 for node, count in counts.items() if duration(node)),
        time=recompute_time(regions, reach) / step if step else 0.0,
    )
