"""The V-shape: stages go down the ranks and up again, and one block of passes repeats.

Source: Pipeline Parallelism with Controllable Memory (Qi et al., arXiv 2405.15362), section 3. A
schedule is a building block, the passes of one microbatch, repeated at a fixed interval and then
squeezed. The distances between neighbouring ranks in the block set how long activations live, and
so the memory; the V-shape makes it the same on every rank.

ZB-V: two stages a rank in a V, hardly a gap, and the activations of 1F1B. V-Half: half of 1F1B's
activations for about half of its bubble. V-Min: the least activations, a third of 1F1B's.
"""

from __future__ import annotations

from itertools import product

from autosplit.errors import ScheduleError

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
