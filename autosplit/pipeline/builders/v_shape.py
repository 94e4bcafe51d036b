"""V-shaped schedules: stages go down the ranks and up again, so each rank holds two stages.

        rank 0   stage 0     stage 7
        rank 1   stage 1     stage 6        microbatches go down the left column,
        rank 2   stage 2     stage 5        and up the right one
        rank 3   stage 3  -> stage 4

ZB-V, V-Half and V-Min repeat one block of passes. Source: Pipeline Parallelism with Controllable
Memory (Qi et al., arXiv 2405.15362), section 3. The building block is the passes of one microbatch;
it is repeated at a fixed interval and then squeezed. The distances between neighbouring ranks in
the block set how long activations live, and so the memory. The V makes the memory equal on every
rank.

| name | activations, beside 1F1B's | bubble |
|---|---|---|
| zb-v | as much | hardly any |
| v-half | half | about half of 1F1B's |
| v-min | a third, the least | two thirds of 1F1B's |

DualPipeV is one half of DualPipe. Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) and the
eight phases of its published implementation (github.com/deepseek-ai/DualPipe). If a phase has a
forward of one direction and a backward of the other, DualPipe may overlap the two; in this schedule
the forward runs first.
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
"""The slots of a rank: F of its lower stage, F and B of its upper one, and B of its lower one."""


def v_shape(ranks: int, microbatches: int, distances: Distances) -> ScheduleTemplate:
    """The V-shape with these distances: rank r of P holds the stages r and 2P-1-r, and runs their F
    and B in the order that the repeated block gives.
    """
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
    return tuple(action for _, action in sorted(passes, key=lambda slotted: slotted[0]))


def _block(ranks: int, distances: Distances) -> list[_Slots]:
    """The slots of each rank in the repeated block.

    The slots between passes at the turns of the V are free to choose. The choice with the fewest
    microbatches in flight is returned.
    """
    blocks: dict[tuple[int, ...], list[_Slots]] = {}
    for turns in product(range(1, _INTERVAL + 1), repeat=3):
        block = [_slots(rank, ranks, distances, turns) for rank in range(ranks)]
        if all(len({slot % _INTERVAL for slot in slots}) == 4 for slots in block):
            blocks[turns] = block  # no two passes of a rank have the same slot
    if not blocks:
        raise ScheduleError(
            f"no block of passes with the distances {distances} repeats every {_INTERVAL} slots on "
            f"{ranks} ranks: use the distances of 'zb-v', 'v-half' or 'v-min'"
        )
    alive = {turns: max(map(_alive, block)) for turns, block in blocks.items()}
    return blocks[min(blocks, key=lambda turns: (alive[turns], sum(turns), turns))]


def _slots(rank: int, ranks: int, distances: Distances, turns: tuple[int, ...]) -> _Slots:
    """The slots of one rank's passes in the repeated block.

    Args:
        rank: the rank.
        ranks: P.
        distances: slots from rank to rank.
        turns: slots between two passes of one rank at the three turns of the V.
    """
    forward_down, forward_up, backward_down, backward_up = distances
    last = ranks - 1
    bottom = last * forward_down + turns[0]
    top = bottom + last * forward_up + turns[1]
    end = top + last * backward_down + turns[2]
    return (
        rank * forward_down,
        bottom + (last - rank) * forward_up,
        top + rank * backward_down,
        end + (last - rank) * backward_up,
    )


def _alive(slots: _Slots) -> int:
    """The most pairs (stage, microbatch) between F and W while blocks repeat.

    F and B leave two slots of each interval free; each W takes the first free one.
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
    """The first slot after ``slot`` with the position ``place`` in its interval."""
    return slot + 1 + (place - slot - 1) % _INTERVAL


def zb_v(ranks: int, microbatches: int) -> ScheduleTemplate:
    """The V-shape in which neighbouring ranks run F down 4 slots apart, F up 2, B down 4, B up 2.

    Source: ZB-V of Zero Bubble (Qi et al., arXiv 2401.10241, section 6), as V-ZB of arXiv
    2405.15362.

    Bubble for F = I = W of two equal stages a rank, P ranks and M >= P: each rank idles (P-1)F,
    with F of one stage. That is the time until the last rank has any work, and a sixth of 1F1B's
    bubble.

    Activation memory: at most 2P pairs (stage, microbatch) between F and W on every rank, as much
    as 1F1B has on its first rank.
    """
    return v_shape(ranks, microbatches, (4, 2, 4, 2))


def v_half(ranks: int, microbatches: int) -> ScheduleTemplate:
    """The V-shape in which neighbouring ranks run F down 1 slot apart, F up 2, B down 1, B up 2.

    Source: V-Half of Qi et al., arXiv 2405.15362.

    Bubble, with P ranks of two equal stages and M >= P: if F = I = W on each stage, each rank idles
    for 3(P-1)F, and for one F less if P is odd and at least 3. That is half of 1F1B's bubble,
    6(P-1)F. With other ratios, or smaller M, the bubble is larger.

    Activation memory: at most 2(floor(P/2)+1) pairs (stage, microbatch) between F and W on every
    rank. For many ranks that is half of the 2P pairs on 1F1B's first rank.
    """
    return v_shape(ranks, microbatches, (1, 2, 1, 2))


def v_min(ranks: int, microbatches: int) -> ScheduleTemplate:
    """The V-shape in which neighbouring ranks run every pass 1 slot apart.

    Source: V-Min of Qi et al., arXiv 2405.15362.

    Bubble for F = I = W of two equal stages a rank, P ranks and M >= P: each rank idles 4(P-1)F + F
    if 3 divides P, and 4(P-1)F - F if not, with F of one stage. That is about two thirds of 1F1B's
    bubble, 6(P-1)F. With other ratios of F, I and W ranks also wait for each other within every
    microbatch, so that the bubble grows with M.

    Activation memory: at most 2 ceil((P+2)/3) pairs (stage, microbatch) between F and W on every
    rank. For many ranks that is a third of the 2P pairs on 1F1B's first rank.
    """
    return v_shape(ranks, microbatches, (1, 1, 1, 1))


# --- DualPipeV ------------------------------------------------------------------------------------


def dual_pipe_v(ranks: int, microbatches: int) -> ScheduleTemplate:
    """DualPipe with one copy of the model instead of two: rank r of P holds the stages r and
    2P-1-r.

    Bubble for equal stages with an I no longer than an F, and M >= 2P: each rank idles
    (P-1)(F+I-W), with F, I and W of one stage.

    Activation memory of every rank: at most 2P + 1 pairs (stage, microbatch).

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
    """The eight phases of one rank, with DualPipe's names for them.

    In DualPipe's notation, stage 0 of a rank is its stage on the way down, and stage 1 its stage on
    the way up; nF0 is n forwards of stage 0.

    Args:
        near: the rank, which is the number of ranks before it.
        ranks: P.
        count: number of microbatches.
    """
    row = _RowWriter((near, 2 * ranks - 1 - near))
    later = ranks - 1 - near

    # Phase 1: nF0
    for _ in range(2 * later):
        row.forward(0)

    # Phase 2: nF0F1
    for _ in range(near + 1):
        row.forward(0)
        row.forward(1)

    # Phase 3: nI1W1F1, the zero-bubble warm-up
    for _ in range(later):
        row.backward_inputs(1)
        row.weight()
        row.forward(1)

    # Phase 4, the main one: nF0B1F1B0
    for _ in range(count - 2 * ranks + near + 1):
        row.forward(0)
        row.backward(1)
        row.forward(1)
        row.backward(0)

    # Phase 5: nB1F1B0
    for _ in range(later):
        row.backward(1)
        row.forward(1)
        row.backward(0)

    # Phase 6: nB1B0. From its middle on, backwards are split, to keep Ws for the waits of 7 and 8.
    full = near + 1
    for position in range(2 * (near + 1)):
        stage = 1 - position % 2
        if position < full:
            row.backward(stage)
        else:
            row.backward_inputs(stage)

    # Phase 7: nW0I0
    for _ in range(later):
        row.weight()
        row.backward_inputs(0)

    # Phase 8: nW
    while row.pending:
        row.weight()
    return tuple(row.row)


class _RowWriter:
    """Writes a rank's row. It tracks the next passes of the rank's two stages, and the pending
    Ws.
    """

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

    def backward_inputs(self, which: int) -> None:
        """Append the next backward as an I; its W becomes pending."""
        stage, microbatch = next(self._backwards[which])
        self.row.append(Action(stage, ActionKind.BACKWARD_INPUT, microbatch))
        self.pending.append(Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch))

    def weight(self) -> None:
        """Append the oldest pending W, if there is one."""
        if self.pending:
            self.row.append(self.pending.popleft())
