"""The core against an oracle that works a step out in the plainest way; orders made in time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.schedule.routes import StageDataflow, StageMessage
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.simulation.playing import ListScheduler, play, rows_of
from autosplit.pipeline.simulation.simulate import Costs, Span
from autosplit.pipeline.simulation.step_graph import StepGraph, Transfer
from tests.pipeline.schedule.random_schedules import random_schedule
from tests.pipeline.simulation.random_costs import costs_of
from tests.pipeline.tables import schedule_of, small

# --- a step worked out in the plainest way: the oracle of the simulator's core --------------------
# Looks over all ranks again and again, and knows wirings and links by their definitions only.


F, I, W, B = ActionKind("F"), ActionKind("I"), ActionKind("W"), ActionKind("B")  # noqa: E741


@dataclass
class Reference:
    """A step of ``schedule``; ``spans`` has those of each rank, in the order in which it ran."""

    schedule: Schedule
    costs: Costs
    made: dict[Action, float] = field(default_factory=dict)
    arrived: dict[tuple[Action, int], float] = field(default_factory=dict)
    free: dict[tuple[int, int], float] = field(default_factory=dict)

    def spans(self) -> list[list[Span]]:
        rows = self.schedule.ranks
        spans: list[list[Span]] = [[] for _ in rows]
        clocks = [0.0] * len(rows)
        places = [0] * len(rows)
        moving = True
        while moving:
            moving = False
            for rank, row in enumerate(rows):
                if places[rank] == len(row):
                    continue
                action = row[places[rank]]
                came = [self.there(need, action.stage, rank) for need in self.needs(action)]
                if None in came:
                    continue
                moving = True
                places[rank] += 1
                ready = max([0.0, *(item for item in came if item is not None)])
                start = max(clocks[rank], ready)
                clocks[rank] = start + self.costs.seconds(action)
                spans[rank].append(Span(rank, action, start, clocks[rank]))
                self.send(action, rank, clocks[rank])
        assert places == [len(row) for row in rows]
        return spans

    def takers(self, stage: int) -> list[int]:
        wiring = self.costs.wiring
        if wiring is None:
            return [stage + 1] if stage + 1 < self.schedule.stages else []
        return [
            taker
            for taker, inputs in enumerate(wiring.inputs)
            if any(source.stage == stage for source in inputs)
        ]

    def sources(self, stage: int) -> list[int]:
        return [index for index in range(stage) if stage in self.takers(index)]

    def needs(self, action: Action) -> list[Action]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is F:
            return [Action(source, F, microbatch) for source in self.sources(stage)]
        if action.kind is W:
            return [Action(stage, I, microbatch)]
        return [
            Action(stage, F, microbatch),
            *(Action(taker, I, microbatch) for taker in self.takers(stage)),
        ]

    def there(self, need: Action, stage: int, rank: int) -> float | None:
        if self.schedule.placement[need.stage] == rank:
            return self.made.get(need)
        return self.arrived.get((need, stage))

    def send(self, action: Action, rank: int, end: float) -> None:
        stage, microbatch = action.stage, action.microbatch
        result = Action(stage, I, microbatch) if action.kind is B else action
        self.made[result] = end
        targets = {F: self.takers, I: self.sources}.get(result.kind, lambda stage: [])(stage)
        for target in targets:
            link = rank, self.schedule.placement[target]
            if link[0] == link[1]:
                continue
            transfer = self.costs.transfer
            begin = max(end, self.free.get(link, 0.0))
            self.free[link] = begin + transfer.message_seconds(
                StageMessage(result, target).boundary
            )
            self.arrived[result, target] = self.free[link] + transfer.latency


# --- the core against an oracle that works a step out in the plainest way; orders made in time ----


NAMED = st.builds(small, st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 5))
RANDOM = st.builds(random_schedule, st.integers(0, 10**6))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.one_of(NAMED, RANDOM))
def test_a_step_is_as_it_is_defined(data: st.DataObject, schedule: Schedule) -> None:
    """Every schedule, copy, wiring and link: to the bit."""
    costs = data.draw(costs_of(schedule.stages))
    timeline = costs.timeline(schedule)
    for rank, spans in enumerate(Reference(schedule, costs).spans()):
        assert [span for span in timeline.spans if span.rank == rank] == spans


def test_a_rank_waits_or_starts_what_its_policy_chooses() -> None:
    """Rank 1 takes the microbatch that has come first, whatever its row says."""
    schedule = schedule_of("0F0 0F1", "1F1 1F0")
    graph = StepGraph(schedule, transfer=Transfer(latency=0.5))
    scheduler = ListScheduler(graph, [2.0] * 4, ranks=2)
    left = [[0, 1], [2, 3]]

    def choose(rank: int, now: float) -> int | None:
        able = [action for action in left[rank] if scheduler.ready(action) <= now]
        if not able:
            return None
        left[rank].remove(able[0])
        return able[0]

    scheduler.run(choose)
    texts = [[str(graph.actions[number]) for number in row] for row in scheduler.rows]
    assert texts == [["0F0", "0F1"], ["1F0", "1F1"]]
    assert play(graph, scheduler.rows, [2.0] * 4).starts == [0.0, 2.0, 4.5, 2.5]
    assert scheduler.ends == [4.0, 6.5]


@settings(deadline=None, max_examples=50)
@given(st.data(), st.builds(random_schedule, st.integers(0, 10**6)))
def test_a_given_order_takes_as_long_as_in_the_core(
    data: st.DataObject, schedule: Schedule
) -> None:
    costs = data.draw(costs_of(schedule.stages))
    dataflow = None if costs.wiring is None else StageDataflow(schedule.stages, costs.wiring)
    graph = StepGraph(schedule, dataflow=dataflow, transfer=costs.transfer)
    seconds, rows = list(map(costs.seconds, graph.actions)), rows_of(schedule)
    scheduler = ListScheduler(graph, seconds, len(rows))
    left = [list(row) for row in rows]

    def choose(rank: int, now: float) -> int | None:
        ready = left[rank] and scheduler.ready(left[rank][0]) <= now
        return left[rank].pop(0) if ready else None

    scheduler.run(choose)
    assert scheduler.rows == [list(row) for row in rows]
    assert max(scheduler.ends) == play(graph, rows, seconds).makespan
