"""A step worked out in the plainest way: the oracle of the simulator's core.

Looks over all ranks again and again, and knows wirings and links by their definitions only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.routes import Parcel, positions_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Span

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
                ready = max([0.0, *(each for each in came if each is not None)])
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
        return [each for each in range(stage) if stage in self.takers(each)]

    def needs(self, action: Action) -> list[Action]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is F:
            return [Action(each, F, microbatch) for each in self.sources(stage)]
        if action.kind is W:
            return [Action(stage, I, microbatch)]
        return [
            Action(stage, F, microbatch),
            *(Action(each, I, microbatch) for each in self.takers(stage)),
        ]

    def there(self, need: Action, stage: int, rank: int) -> float | None:
        if self.schedule.home(need.stage, need.microbatch) == rank:
            return self.made.get(need)
        return self.arrived.get((need, stage))

    def send(self, action: Action, rank: int, end: float) -> None:
        stage, microbatch = action.stage, action.microbatch
        result = Action(stage, I, microbatch) if action.kind is B else action
        self.made[result] = end
        targets = {F: self.takers, I: self.sources}.get(result.kind, lambda stage: [])(stage)
        for target in targets:
            link = rank, self.schedule.home(target, microbatch)
            if link[0] == link[1]:
                continue
            latency, bandwidth = self.costs.transfer.link(*link)
            begin = max(end, self.free.get(link, 0.0))
            self.free[link] = begin + self.size(Parcel(result, target)) / bandwidth
            self.arrived[result, target] = self.free[link] + latency

    def size(self, parcel: Parcel) -> float:
        wiring, transfer = self.costs.wiring, self.costs.transfer
        if wiring is None:
            return transfer.bytes_of(parcel)
        positions = positions_of(parcel, self.schedule, Feeds(self.schedule.stages, wiring)) or ()
        return transfer.bytes_of(parcel, positions, wiring.outputs[parcel.boundary])
