"""Collectives over the parameters of stages, as transfers of a step graph.

Every rank has one lane of collectives, which run one after another beside its actions:

    rank          0UNSHARD  3F0   0F0 ...       3W7   3REDUCE_GRAD  0W7   0REDUCE_GRAD
                   |               |                   |                   |
    collectives    [ all-gather 0 ]                    [ reduce 3 ]        [ reduce 0 ]

0F0 waits for the all-gather, and the step ends when the last reduction has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action, ActionKind, Schedule

from .step_graph import Lanes

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are reduced together."""
_AHEAD = 2  # blocks that are gathered at a time, see ``GatherOrder``


@dataclass(frozen=True)
class StageCollectives:
    """Seconds of the collectives over one stage's parameters, and how they are divided.

    Attributes:
        gather: seconds of the all-gathers of the stage's shards; 0 without shards.
        reduction: seconds of the reductions of the stage's gradients in a step.
        parts: the number of blocks, which are gathered one after another, and of buckets, which are
            reduced one after another; all of one size.
        regathers: whether each call gathers anew, block by block (``reshard_after_forward=True``).
    """

    gather: float = 0.0
    reduction: float = 0.0
    parts: int = 1
    regathers: bool = False


@dataclass(frozen=True)
class ParameterRanks:
    """The ranks that have copies or shards of a stage's parameters, and the link between them.

    Attributes:
        link: the link from each rank to its neighbour, in each direction.
        replicas: the ranks that reduce gradients of copies.
        shards: the ranks that gather shards once a step.
    """

    link: Link
    replicas: int = 1
    shards: int = 1

    def of_stage(self, size: float) -> StageCollectives:
        """Return the collectives of a stage with so many bytes of parameters, by rings."""
        gather, parts = (1 - 1 / self.shards) * size, math.ceil(size / BUCKET_BYTES)
        reduced = gather + 2 * (1 - 1 / self.replicas) * size / self.shards

        def seconds(moved: float) -> float:
            return self.link.duration(moved, parts) if moved else 0.0

        return StageCollectives(seconds(gather), seconds(reduced), max(1, parts))


def with_collectives(schedule: Schedule, stages: Sequence[StageCollectives]) -> Schedule:
    """Return the schedule with UNSHARD and REDUCE_GRAD of the stages that have shards."""
    return add_gathers(schedule, {stage for stage, costs in enumerate(stages) if costs.gather})


def add_collectives(lanes: Lanes, stages: Sequence[StageCollectives]) -> None:
    """Add the collectives of a step to its graph, with the waits for them.

    Args:
        lanes: the rows of a schedule from ``with_collectives``; gets a lane for each rank.
        stages: by stage.
    """
    for rank in range(lanes.ranks):
        _RankCollectives(lanes, rank, stages).add_to_row()


class _RankCollectives:
    """Adds the collectives of one rank, in the order in which its actions start them."""

    def __init__(self, lanes: Lanes, rank: int, stages: Sequence[StageCollectives]) -> None:
        self._graph, self._rank, self._row = lanes.graph, rank, lanes.rows[rank]
        self._seconds, self._lanes, self._stages = lanes.seconds, lanes, stages
        self._lane_index, self._lane = len(lanes.rows), list[int]()
        lanes.rows.append(self._lane)
        self._last_blocks: list[tuple[int, int]] = []

    def add_to_row(self) -> None:
        """Add the gathers of parameters and reductions of gradients to the rank's simulated row,
        with the waits for them.
        """
        actions = [(number, self._graph.actions[number]) for number in self._row]
        reduced = {a.stage for _, a in actions if a.kind is ActionKind.REDUCE_GRAD}
        last = {a.stage: number for number, a in actions if a.kind in BACKWARDS}
        readers = [*self._readers()]
        following = dict(pairwise(readers))
        unsharding: dict[int, int] = {}
        if readers:
            self._gather_blocks(None, readers[0])
        for number, action in actions:
            stage, costs = action.stage, self._stages[action.stage]
            if action.kind is ActionKind.UNSHARD and not costs.regathers:
                unsharding[stage] = self._add(action, costs.gather, number)
            elif action.kind is ActionKind.REDUCE_GRAD:
                self._add(action, costs.reduction, number)
            elif action.kind.is_compute and stage in unsharding:
                self._graph.add_wait(unsharding.pop(stage), number)
            if number in following:
                self._gather_blocks(number, following[number])
            if number == last.get(stage) and stage not in reduced and costs.reduction:
                self._reduce_buckets(number, costs)

    def _readers(self) -> Iterator[int]:
        """Yield the actions that read parameters which are gathered for each call: F, I and B, and
        W on stages whose I takes no time.
        """
        read_by_inputs: set[int] = set()
        for number in self._row:
            action = self._graph.actions[number]
            if not self._stages[action.stage].regathers or not self._seconds[number]:
                continue
            if action.kind is ActionKind.BACKWARD_INPUT:
                read_by_inputs.add(action.stage)
            is_weight = action.kind is ActionKind.BACKWARD_WEIGHT
            if action.kind.is_compute and not (is_weight and action.stage in read_by_inputs):
                yield number

    def _gather_blocks(self, previous: int | None, reader: int) -> None:
        """Gather the blocks of a call one after another, each up to two blocks ahead of its use.

        The gather of the first block starts with the last block of the previous call. All other
        blocks must have arrived when the last block of this call begins.
        """
        action = self._graph.actions[reader]
        costs = self._stages[action.stage]
        missing = costs.parts - self._blocks_that_stayed(action)
        gather = Action(action.stage, ActionKind.UNSHARD, 0)
        block, compute = costs.gather / costs.parts, self._seconds[reader] / costs.parts
        if missing == costs.parts:
            last_block = 0.0
            if previous is not None:
                stage = self._graph.actions[previous].stage
                last_block = self._seconds[previous] / self._stages[stage].parts
            first = self._add(gather, block, previous, -last_block)
            self._graph.add_wait(first, reader)
            missing -= 1
        if missing:
            later = self._add(gather, missing * block, previous)
            self._graph.add_wait(later, reader, compute - self._seconds[reader])

    def _blocks_that_stayed(self, reader: Action) -> int:
        """Return how many of a call's first blocks are still gathered, because the previous call
        read them last.
        """
        blocks = [(reader.stage, number) for number in range(self._stages[reader.stage].parts)]
        if reader.kind in BACKWARDS:
            blocks.reverse()
        stayed = [*takewhile(self._last_blocks.__contains__, blocks[:_AHEAD])]
        order = dict.fromkeys([*reversed(blocks), *reversed(self._last_blocks)])
        self._last_blocks = [*order][:_AHEAD][::-1]
        return len(stayed)

    def _reduce_buckets(self, last: int, costs: StageCollectives) -> None:
        """Reduce the buckets that a stage's last backward completes, one after another."""
        reduction = Action(self._graph.actions[last].stage, ActionKind.REDUCE_GRAD, 0)
        bucket = costs.reduction / costs.parts
        if costs.parts > 1:
            until_end = self._seconds[last] * (1 - 1 / costs.parts)
            self._add(reduction, costs.reduction - bucket, last, -until_end)
        self._add(reduction, bucket, last)

    def _add(self, action: Action, seconds: float, after: int | None, latency: float = 0.0) -> int:
        """Add a collective that starts ``latency`` seconds after the end of an action, or before it
        if negative. Return its number.
        """
        number = self._graph.add_action(self._lane_index, action)
        self._seconds.append(seconds)
        self._lane.append(number)
        self._lanes.ends.append((self._rank, action, number, 0.0))
        if after is not None:
            self._graph.add_wait(after, number, latency)
        return number
