"""The ways to run a list: named schedules in two orders, the order that is found, and padding."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.microbatch_order import MicrobatchOrders
from autosplit.pipeline.search.search import named_schedules
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.trainer.tuning import usual_times

IN_ORDER, SORTED, FOUND, PADDED = "in order", "sorted", "found", "padded"
WAYS = (IN_ORDER, SORTED, FOUND, PADDED)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A schedule for a list, and what its microbatches cost."""

    schedule: Schedule
    costs: Sequence[Costs]

    @property
    def step(self) -> float:
        """Seconds of the simulated step."""
        return simulate(self.schedule, lambda a: self.costs[a.microbatch].seconds(a)).makespan

    @property
    def peaks(self) -> list[float]:
        """The most bytes that each rank keeps, action by action."""
        return [max(self._levels(rank)) for rank in range(len(self.schedule.ranks))]

    def _levels(self, rank: int) -> Iterator[float]:
        level = 0.0
        for action in self.schedule.ranks[rank]:
            memory = self.costs[action.microbatch].memory[action.stage]
            change = memory.change(action.kind)
            yield level + change.allocated
            level += change.allocated - change.freed


def bound(costs: Sequence[Costs]) -> float:
    """The work of the slowest rank, or the longest chain: no step is shorter. One stage a rank."""
    stages = range(len(costs[0].times))
    work = max(sum(sum(each.times[stage]) for each in costs) for stage in stages)
    chain = max(sum(f + i for f, i, _ in each.times) + each.times[0][2] for each in costs)
    return max(work, chain)


class Contenders:
    """All ways for lists of one number of microbatches and of ranks with one stage each."""

    def __init__(self, ranks: int, count: int) -> None:
        self.named = named_schedules(usual_times(ranks), count, ranks)
        self.orders = MicrobatchOrders(range(ranks), usual_times(ranks))

    def of(self, costs: Sequence[Costs], cap: float = math.inf) -> dict[str, Contender]:
        """The shortest of each way within a cap on the bytes of a rank; none if none keeps it."""
        ascending = sorted(range(len(costs)), key=lambda m: costs[m].times[0][0])
        longest = costs[ascending[-1]]
        lists = {
            IN_ORDER: costs,
            SORTED: [costs[microbatch] for microbatch in ascending],
            PADDED: [longest] * len(costs),
        }
        best = {}
        for way, each in lists.items():
            able = [Contender(schedule, each) for schedule in self.named]
            able = [contender for contender in able if max(contender.peaks) <= cap]
            if able:
                best[way] = min(able, key=lambda contender: contender.step)
        best[FOUND] = Contender(self.orders.find(costs, cap), costs)
        return best

    def planning_seconds(self, costs: Sequence[Costs], cap: float, times: int) -> float:
        """Seconds of finding the order of a list that is not remembered: the fewest of some
        times.
        """
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            self.orders.find(costs, cap)
            seconds.append(time.perf_counter() - start)
        return min(seconds)
