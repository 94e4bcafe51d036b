"""More stages than a schedule needs: a contiguous block of stages runs as one large stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .fill import StageTimes
from .weights import Times, per_stage


def block_sizes(stages: int, blocks: int) -> list[int]:
    """How many stages each block holds; the first ``stages % blocks`` hold one more."""
    size, larger = divmod(stages, blocks)
    return [size + 1 if block < larger else size for block in range(blocks)]


def block_times(times: Times, sizes: Sequence[int]) -> list[StageTimes]:
    """The times of each block: the sums over its stages.

    Raises:
        ScheduleError: not triples of finite numbers >= 0, or not one for each stage.
    """
    rest = iter(per_stage(times, sum(sizes)))
    sums = []
    for size in sizes:
        forward, backward_input, backward_weight = zip(*islice(rest, size), strict=True)
        sums.append((sum(forward), sum(backward_input), sum(backward_weight)))
    return sums


def expand(schedule: Schedule, sizes: Sequence[int]) -> Schedule:
    """Replace each stage by a contiguous block of stages on the same rank.

    An F becomes the block's Fs, first stage first; an I, W or B becomes those of the block, last
    stage first. So the step keeps the shape it has with one stage a rank: as legal, with the same
    messages, and with as many microbatches in flight on every stage of a block.

    Args:
        schedule: of as many stages as there are blocks.
        sizes: stages in each block, each >= 1.
    """
    first = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def members(action: Action) -> list[Action]:
        block = range(first[action.stage], first[action.stage] + sizes[action.stage])
        order = block if action.kind is ActionKind.FORWARD else reversed(block)
        return [Action(stage, action.kind, action.microbatch) for stage in order]

    return replace(
        schedule,
        stages=sum(sizes),
        ranks=tuple(
            tuple(each for action in row for each in members(action)) for row in schedule.ranks
        ),
        placement=spread(schedule.placement, sizes),
        mirror=None if schedule.mirror is None else spread(schedule.mirror, sizes),
    )


def spread(placement: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The rank of every stage, where blocks of stages lie on these ranks."""
    return tuple(rank for rank, size in zip(placement, sizes, strict=True) for _ in range(size))
