"""Schedules in a V: stages go down the ranks and up again.

ZB-V, V-Half and V-Min repeat one block of passes. Source: Pipeline Parallelism with Controllable
Memory (Qi et al., arXiv 2405.15362), section 3. A schedule is a building block, the passes of one
microbatch, repeated at a fixed interval and then squeezed. The distances between neighbouring ranks
in the block set how long activations live, and so the memory; the V-shape makes it the same on
every rank. ZB-V: two stages a rank in a V, hardly a gap, and the activations of 1F1B. V-Half: half
of 1F1B's activations for about half of its bubble. V-Min: the least activations, a third of 1F1B's.

DualPipeV: microbatches enter a V of stages, and a rank runs one stage on the way down and one on
the way up. Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) and the eight phases of its
published implementation (github.com/deepseek-ai/DualPipe), cut in half. A rank that meets a forward
of one direction and a backward of the other in the same phase may overlap them; here the forward
comes first.
"""

from __future__ import annotations

import itertools
from collections import deque
from itertools import product

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Action, ActionKind

from .placement import Row, ScheduleTemplate, backward, forward

_INTERVAL = 6  # slots from one microbatch to the next: F, I and W of two stages

Distances = tuple[int, int, int, int]
"""Slots from rank to rank in F on the way down, F up, B down and B up."""

_Slots = tuple[int, int, int, int]
"""When a rank runs F of its lower stage, F and B of its upper one, and B of its lower one."""


def v_shape(ranks: int, microbatches: int, distances: Distances) -> ScheduleTemplate:
    """Stages r and 2P-1-r on rank r of P, in the order of the repeated block."""
    block = _block(ranks, distances)
    return ScheduleTemplate(
        tuple(_row(rank, ranks, microbatches, block[rank]) for rank in range(ranks)),
        (*range(ranks), *reversed(range(ranks))),
        budget=max(map(_alive, block)),
    )


def _row(rank: int, ranks: int, microbatches: int, slots: _Slots) -> Row:
    lower, upper = rank, 2 * ranks - 1 - rank
    makers = ((forward, lower), (forward, upper), (backward, upper), (backward, lower))
    passes = [
        (slot + _INTERVAL * microbatch, make(stage, microbatch))
        for microbatch in range(microbatches)
        for slot, (make, stage) in zip(slots, makers, strict=True)
    ]
    return tuple(action for _, action in sorted(passes, key=lambda each: each[0]))


def _block(ranks: int, distances: Distances) -> list[_Slots]:
    """Per rank, its slots: of all turns that let blocks repeat, those that keep least alive."""
    found: tuple[tuple[int, int, tuple[int, ...]], list[_Slots]] | None = None
    for turns in product(range(1, _INTERVAL + 1), repeat=3):
        block = [_slots(rank, ranks, distances, turns) for rank in range(ranks)]
        if any(len({slot % _INTERVAL for slot in slots}) < 4 for slots in block):
            continue  # two passes of a rank fall on each other
        cost = max(map(_alive, block)), sum(turns), turns
        if found is None or cost < found[0]:
            found = cost, block
    if found is None:
        raise ScheduleError(
            f"no block of passes with the distances {distances} repeats every {_INTERVAL} slots on "
            f"{ranks} ranks"
        )
    return found[1]


def _slots(rank: int, ranks: int, distances: Distances, turns: tuple[int, ...]) -> _Slots:
    """``turns`` are the slots between the passes of one rank where the way turns round."""
    forward_down, forward_up, backward_down, backward_up = distances
    last = ranks - 1
    bottom = last * forward_down + turns[0]
    top = bottom + last * forward_up + turns[1]
    back = top + last * backward_down + turns[2]
    return (
        rank * forward_down,
        bottom + (last - rank) * forward_up,
        top + rank * backward_down,
        back + (last - rank) * backward_up,
    )


def _alive(slots: _Slots) -> int:
    """The most pairs of a stage and a microbatch between F and W while blocks repeat.

    The two slots that F and B leave free are for the Ws, and each W takes the first that comes.
    """
    forward_lower, forward_upper, backward_upper, backward_lower = slots
    free = sorted(set(range(_INTERVAL)) - {slot % _INTERVAL for slot in slots})
    lives = []
    for one, other in (free, reversed(free)):
        ends = (
            _next(backward_upper, one),
            _next(backward_lower, other),
        )
        lives.append(((forward_upper, ends[0]), (forward_lower, ends[1])))
    shortest = min(lives, key=lambda pair: sum(end - start for start, end in pair))
    return max(
        sum((slot - start) // _INTERVAL - (slot - end - 1) // _INTERVAL for start, end in shortest)
        for slot in range(_INTERVAL)
    )


def _next(slot: int, place: int) -> int:
    """The first slot behind ``slot`` that is ``place`` within its interval."""
    return slot + 1 + (place - slot - 1) % _INTERVAL


def zb_v(ranks: int, microbatches: int) -> ScheduleTemplate:
    """The V-shape with rank-to-rank distances 4, 2, 4 and 2.

    Source: ZB-V of Zero Bubble (Qi et al., arXiv 2401.10241, section 6), as V-ZB of arXiv
    2405.15362.

    Bubble for F = I = W of two like stages a rank, P ranks and M >= P: each rank idles (P-1)F,
    where F is that of one stage: the time until the last rank has work at all, and a sixth of
    1F1B's bubble.

    Activation memory: at most 2P pairs of a stage and a microbatch between F and W on every rank,
    as much as 1F1B on its first.
    """
    return v_shape(ranks, microbatches, (4, 2, 4, 2))


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


# --- DualPipeV ------------------------------------------------------------------------------------


def dual_pipe_v(ranks: int, microbatches: int) -> ScheduleTemplate:
    """DualPipe cut in half: rank r of P holds the stages r and 2P-1-r of one copy.

    Bubble for like stages with an I no longer than an F, and M >= 2P: each rank idles
    (P-1)(F+I-W), where F, I and W are those of one stage.

    Activation memory of every rank: at most 2P + 1 pairs of a stage and a microbatch.

    Raises:
        ScheduleError: fewer than 2P microbatches.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"'dualpipe-v' needs at least 2P microbatches: expected {2 * ranks} or more for "
            f"{ranks} ranks, got {microbatches}"
        )

    rows = tuple(_phases(rank, ranks, microbatches) for rank in range(ranks))
    return ScheduleTemplate(rows, (*range(ranks), *reversed(range(ranks))))


def _phases(near: int, ranks: int, count: int) -> Row:
    """The eight phases of the rank that is ``near`` steps into the V, of ``ranks``.

    Stage 0 of its two is the one on the way down, which it meets in the first half of the way.
    """
    rank = _RowWriter((near, 2 * ranks - 1 - near))
    behind = ranks - 1 - near
    for _ in range(2 * behind):
        rank.forward(0)
    for _ in range(near + 1):
        rank.forward(0)
        rank.forward(1)
    for _ in range(behind):
        rank.inputs(1)
        rank.weight()
        rank.forward(1)
    for _ in range(count - 2 * ranks + near + 1):
        rank.forward(0)
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    for _ in range(behind):
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    # From the middle of the next phase on, Ws are kept for the waits of the last two.
    order = [which for _ in range(near + 1) for which in (1, 0)] + [0] * behind
    whole = near + 1
    for place, which in enumerate(order):
        if place >= 2 * (near + 1):
            rank.weight()
        (rank.backward if place < whole else rank.inputs)(which)
    while rank.pending:
        rank.weight()
    return tuple(rank.row)


class _RowWriter:
    """A row being written: the next passes of both stages, and the Ws that wait."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self._forwards, self._backwards = (
            [zip(itertools.repeat(stage), itertools.count(), strict=False) for stage in stages]
            for _ in range(2)
        )
        self.pending: deque[Action] = deque()
        self.row: list[Action] = []

    def forward(self, which: int) -> None:
        self.row.append(forward(*next(self._forwards[which])))

    def backward(self, which: int) -> None:
        self.row.append(backward(*next(self._backwards[which])))

    def inputs(self, which: int) -> None:
        """The next backward as an I, whose W waits."""
        stage, microbatch = next(self._backwards[which])
        self.row.append(Action(stage, ActionKind.BACKWARD_INPUT, microbatch))
        self.pending.append(Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch))

    def weight(self) -> None:
        """The oldest W that waits, if any does."""
        if self.pending:
            self.row.append(self.pending.popleft())
