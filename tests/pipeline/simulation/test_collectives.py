"""Collectives in simulated steps, against the executor with stages and collectives that take known
time on a clock of the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from autosplit.errors import ScheduleError
from autosplit.gathering import Gathering, GatherOrder
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.placement import complete_by_stage
from autosplit.pipeline.engine.boundaries import Boundaries
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.routes import routes_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.search import reduced_early, search
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.collectives import (
    BUCKET_BYTES,
    ParameterRanks,
    StageCollectives,
)
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.ranks.groups import Groups
from tests.pipeline.tables import rows_of
from tests.pipeline.tables import schedule_of as table

CPU = torch.device("cpu")
TIMES = [(2.0, 3.0, 2.0), (4.0, 2.0, 4.0)]


class Clock:
    """The time of a rank, and when its collectives under way have ended."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def start(self, seconds: float) -> float:
        self.free = max(self.now, self.free) + seconds
        return self.free


class ClockedGroup:
    """A parameter group of one block, with FSDP2's ``reshard_after_forward=True``."""

    reshards_after_backward = True

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.is_unsharded, self._end = False, 0.0

    def start_unshard(self) -> None:
        self._end = self._end or self._clock.start(self._seconds)

    def finish_unshard(self) -> None:
        self._clock.now = max(self._clock.now, self._end)
        self.is_unsharded = True

    def reshard(self) -> None:
        self.is_unsharded, self._end = False, 0.0

    reshard_after_forward = reshard


class ClockedModule:
    """Gathers groups as ``ShardedModule`` does."""

    def start_gather(self, groups: Sequence[ClockedGroup]) -> None:
        for group in groups:
            if not group.is_unsharded:
                group.start_unshard()

    def gather_groups(self, groups: Sequence[ClockedGroup]) -> None:
        self.start_gather(groups)
        for group in groups:
            group.finish_unshard()


class ClockedStage:
    """A stage that takes known time, block by block."""

    def __init__(self, index: int, clock: Clock, costs: StageCollectives, last: int) -> None:
        self.clock, self.costs, self._last = clock, costs, last
        self._times = TIMES[index]
        self.gathering = Gathering(ClockedModule())  # type: ignore[arg-type]
        block = costs.gather / costs.parts
        self.groups = [ClockedGroup(clock, block) for _ in range(costs.parts)]

    def _run(self, name: str, seconds: float, groups: list[ClockedGroup]) -> list[Any]:
        for number in range(self.costs.parts):

            def call(_: list[Any]) -> list[Any]:
                self.clock.now += seconds / self.costs.parts
                return []

            if self.costs.regathers and groups:
                self.gathering._run_gathered(name, [groups[number]], call, [])  # type: ignore[list-item]
            else:
                call([])
        return []

    def forward(self, microbatch: int, inputs: list[Any]) -> list[Any]:
        return self._run("forward", self._times[0], self.groups)

    def backward_input(self, microbatch: int, grads: list[Any]) -> list[Any]:
        return self._run("backward_input", self._times[1], self.groups[::-1])

    def backward_weight(self, microbatch: int) -> None:
        costs = self.costs
        for _ in range(costs.parts):
            self.clock.now += self._times[2] / costs.parts
            if microbatch == self._last and not costs.gather:
                self.clock.start(costs.reduction / costs.parts)

    def backward(self, microbatch: int, grads: list[Any]) -> list[Any]:
        raise NotImplementedError

    def publish(self) -> None:
        pass


class ClockedSharding:
    """Gathers and reduces stages where the schedule says."""

    def __init__(self, stages: dict[int, ClockedStage]) -> None:
        self._stages, self._ends = stages, dict[int, float]()

    def __contains__(self, stage: int) -> bool:
        return self._stages[stage].costs.gather > 0

    def start_gather(self, stage: int) -> None:
        if not self._stages[stage].costs.regathers:
            costs = self._stages[stage].costs
            self._ends[stage] = self._stages[stage].clock.start(costs.gather)

    def finish_gather(self, stage: int) -> None:
        clock = self._stages[stage].clock
        clock.now = max(clock.now, self._ends.get(stage, 0.0))

    def free(self, stage: int) -> None:
        pass

    def start_reduction(self, stage: int) -> None:
        self._stages[stage].clock.start(self._stages[stage].costs.reduction)


def costs_of(*collectives: StageCollectives) -> Costs:
    return Costs(TIMES, [StageMemory(1.0, 1.0)] * 2, collectives=collectives)


def executed(schedule: Schedule, costs: Costs) -> float:
    """Seconds of the second step, from its start to the end of its reductions."""
    clock, order = Clock(), GatherOrder()
    last = schedule.microbatches - 1
    stages = {
        index: ClockedStage(index, clock, part, last)
        for index, part in enumerate(costs.collectives)
    }
    for stage in stages.values():
        stage.gathering.order = order
    schedule = add_gathers(schedule, {s for s, stage in stages.items() if stage.costs.gather})
    boundaries = Boundaries()
    boundaries.outputs |= dict.fromkeys(stages, ())
    transport = Transport(routes_of(schedule)[0], Groups(1, CPU, 1.0), device=CPU, posts={})
    executor = Executor(stages, schedule, 0, transport, sharding=ClockedSharding(stages))
    for _ in range(2):
        for stage in stages.values():
            for group in stage.groups:
                group.reshard()
        order.begin_order()
        clock.now = clock.free = 0.0
        stages[0].gathering.gather_ahead()
        empty = [[]] * schedule.microbatches
        executor.run(empty, empty, [boundaries] * schedule.microbatches, None, empty)
    return max(clock.now, clock.free)


WHOLE = StageCollectives(gather=3.0, reduction=5.0)
BUCKETS = StageCollectives(reduction=6.0, parts=4)
ROWS = ["gpipe 2bp", "1f1b 2bp", "1f1b fill", "interleaved fill"]


def schedule_of(row: str) -> Schedule:
    name, weights = row.split()
    return build(name, 2, 3, ranks=1, weights=weights)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("stages", [(WHOLE, WHOLE), (BUCKETS, BUCKETS), (BUCKETS, WHOLE)])
def test_a_step_takes_as_long_as_the_executor(
    row: str, stages: tuple[StageCollectives, ...]
) -> None:
    schedule, costs = schedule_of(row), costs_of(*stages)
    assert costs.timeline(schedule).makespan == pytest.approx(executed(schedule, costs))
    assert costs.timeline(schedule).makespan > costs_of().timeline(schedule).makespan


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("gather", [0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_blocks_that_are_gathered_for_each_call(row: str, gather: float, blocks: int) -> None:
    """Within the time of the two blocks that stay where a forward turns into a backward."""
    part = StageCollectives(gather, 1.0, blocks, regathers=True)
    schedule, costs = schedule_of(row), costs_of(part, part)
    simulated, real = costs.timeline(schedule).makespan, executed(schedule, costs)
    assert simulated == pytest.approx(real, rel=0.1), (simulated, real)


@pytest.mark.parametrize(
    ("reductions", "last", "steps"),
    [
        ((9.0, 1.0), "0W0 0W1 1W0 1W1", [40.0, 36.0, 36.0]),
        ((1.0, 9.0), "1W0 1W1 0W0 0W1", [43.0, 43.0, 40.0]),
    ],
)
def test_ws_at_the_end_of_a_row_hide_reductions(
    reductions: tuple[float, float], last: str, steps: list[float]
) -> None:
    """Mixed, stage by stage, and in the order of the costs."""
    costs = costs_of(*[StageCollectives(reduction=seconds) for seconds in reductions])
    mixed = table("0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 0W0 1W0 0W1 1W1", placement=(0, 0))
    grouped = replace(mixed, ranks=tuple(map(complete_by_stage, mixed.ranks)))
    assert rows_of(grouped)[0].endswith("0W0 0W1 1W0 1W1")
    (ordered,) = reduced_early([mixed], costs)
    assert rows_of(ordered)[0].endswith(last)
    assert not [*reduced_early([ordered], costs)]
    schedules = mixed, grouped, ordered
    assert [costs.timeline(schedule).makespan for schedule in schedules] == steps
    assert [executed(schedule, costs) for schedule in schedules] == steps


def test_the_search_hides_reductions() -> None:
    costs = costs_of(StageCollectives(reduction=9.0), StageCollectives(reduction=1.0))
    schedule, blind = search(costs, 3, ranks=1), search(costs_of(), 3, ranks=1)
    assert costs.timeline(schedule).makespan == 52.0
    assert costs.timeline(blind).makespan == 60.0


def test_rings_carry_the_bytes_of_other_ranks() -> None:
    """All-gather and reduce-scatter (n - 1) / n of them, an all-reduce twice as many."""
    link = Link(0.0, 2.0)
    assert ParameterRanks(link, replicas=4).of_stage(8.0) == StageCollectives(0.0, 6.0)
    assert ParameterRanks(link, shards=2).of_stage(8.0) == StageCollectives(2.0, 2.0)
    assert ParameterRanks(link, replicas=2, shards=2).of_stage(8.0).reduction == 4.0
    slow = ParameterRanks(Link(1.0, 2.0), replicas=2).of_stage(2.0 * BUCKET_BYTES)
    assert (slow.parts, slow.reduction) == (2, 2.0 + BUCKET_BYTES)


def test_collectives_of_other_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="one entry of collectives for each of 2 stages, or no"):
        costs_of(WHOLE)
