"""Is a schedule legal? All faults at once, shown on the grid."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from autosplit.errors import DeadlockError, ScheduleError
from autosplit.pipeline.schedule.schedule import LARGEST, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.playing import Wait, replay

from .grid import Cell, describe, format_grid, lay_out

_WIDEST = 60  # slots and ranks in an error's grid; of more only those near a fault are shown
_CIRCLE = "deadlock: "
_MOST = 50  # faults that are looked for; where there are more, none of the rest tells anything new


@dataclass(frozen=True)
class _Fault:
    """``cells`` are (rank, position in its list); the position after the last marks a lack."""

    text: str
    cells: tuple[Cell, ...] = ()


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run or would compute something else than one step.

    Legal means: every stage runs every F once, and for every microbatch either one B or one I and
    one W, on the rank that holds the stage; and running the lists in order cannot deadlock, F
    before I (or B) before W. What a microbatch holds is moved away at most once at a time and is
    back before it is used; partners list the transfers between them in one order; and a microbatch
    is run again at most once, before its backward, and is not moved before that.

    Raises:
        ScheduleError: lists the faults (of more than 50 the first) and shows them on the grid; a
            DeadlockError where there are none but circles.
    """
    count = sum(map(len, schedule.ranks))
    if count > LARGEST:
        raise ScheduleError(
            f"{describe(schedule)}, {count:,} actions: more than the {LARGEST:,} that are taken"
        )
    # Lazily: a schedule may name a billion microbatches of which it runs none.
    faults = list(islice(_sizes(schedule), _MOST + 1))
    if not faults:  # the other checks index by stage and rank
        checks = [
            _strays(schedule),
            _counts(schedule),
            _deadlocks(schedule),
            _move_faults(schedule),
        ]
        faults = list(islice(chain(*checks), _MOST + 1))
    if faults:
        waits = all(fault.text.startswith(_CIRCLE) for fault in faults)
        raise (DeadlockError if waits else ScheduleError)(_report(schedule, faults))


def _sizes(schedule: Schedule) -> Iterator[_Fault]:
    """Counts and placement."""
    for what, count in (("stages", schedule.stages), ("microbatches", schedule.microbatches)):
        if count < 1:
            yield _Fault(f"{what} must be at least 1, got {count}")
    ranks = len(schedule.ranks)
    placement = schedule.placement
    if len(placement) != schedule.stages:
        yield _Fault(
            f"placement must name a rank for each of the {schedule.stages} stages, "
            f"got {len(placement)}: {reprlib.repr(placement)}"
        )
    for stage, rank in enumerate(placement):
        if not 0 <= rank < ranks:
            yield _Fault(f"stage {stage} is placed on rank {rank}; ranks are 0 to {ranks - 1}")
    for rank in sorted(set(range(ranks)) - set(placement)):
        yield _Fault(f"rank {rank} holds no stage; use fewer ranks")


def _misfit(action: Action, schedule: Schedule) -> str | None:
    """Why ``action`` does not exist in this pipeline, or None when it does."""
    if not action.kind.is_scheduled:
        return (
            f"{action} is none of the actions that a schedule lists: F, I, W, B, and those of "
            "memory"
        )
    for what, value, count in (
        ("stage", action.stage, schedule.stages),
        ("microbatch", action.microbatch, schedule.microbatches),
    ):
        if not 0 <= value < count:
            return f"{action}: no {what} {value}; expected 0 to {count - 1}"
    return None


def _strays(schedule: Schedule) -> Iterator[_Fault]:
    """Actions that do not belong in this pipeline, or not on their rank."""
    unsplit = []
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            misfit = _misfit(action, schedule)
            if misfit is not None:
                yield _Fault(misfit, ((rank, position),))
                continue
            if rank not in _right_ranks(action, schedule):
                home = schedule.placement[action.stage]
                holds = f"rank {home} holds stage {action.stage}"
                if action.kind in (ActionKind.ACCEPT, ActionKind.RETURN):
                    holds += f" and has the partner {schedule.partner(home)}"
                yield _Fault(f"{action} is on rank {rank}, but {holds}", ((rank, position),))
            if action.kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT):
                unsplit.append((rank, position))
    if unsplit and not schedule.split_backward:
        yield _Fault("split_backward is False, but the schedule has I or W", tuple(unsplit))


def _counts(schedule: Schedule) -> Iterator[_Fault]:
    """Every F once, and per microbatch one B or one I and one W."""
    found: dict[Action, list[Cell]] = defaultdict(list)
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            found[action].append((rank, position))
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            forward, inputs, weights, full = (
                Action(stage, kind, microbatch)
                for kind in (
                    ActionKind.FORWARD,
                    ActionKind.BACKWARD_INPUT,
                    ActionKind.BACKWARD_WEIGHT,
                    ActionKind.BACKWARD,
                )
            )
            cells = {
                action: tuple(found.get(action, ())) for action in (forward, inputs, weights, full)
            }
            home = schedule.placement[stage]
            end = ((home, len(schedule.ranks[home])),)  # behind the last action
            split = cells[inputs] + cells[weights]
            if cells[full] and split:
                yield _Fault(
                    f"stage {stage} mixes B with I or W on microbatch {microbatch}: expected "
                    f"{inputs} and {weights}, or {full} alone",
                    split + cells[full],
                )
            if not cells[full] and not split:
                yield _Fault(f"stage {stage} never runs {inputs} and {weights}, nor {full}", end)
            required = (forward, inputs, weights) if split and not cells[full] else (forward,)
            for action in required:
                if not cells[action]:
                    yield _Fault(f"stage {stage} never runs {action}", end)
            for action, where in cells.items():
                if len(where) > 1:
                    yield _Fault(f"{action} runs {len(where)} times, expected once", where)


def _deadlocks(schedule: Schedule) -> Iterator[_Fault]:
    """Circles of ranks that wait for each other. What is never made is another check's fault."""
    run = replay(schedule)
    for circle in run.cycles():
        cells = tuple(_standing(each, run.times) for each in circle if each.rank < each.ranks)
        yield _Fault(f"{_CIRCLE}{'; '.join(map(str, circle))}", cells)


def _standing(wait: Wait, times: list[list[tuple[float, float]]]) -> Cell:
    return wait.rank, len(times[wait.rank])


# --- what is moved away, and run again -----------------------------------------------------------

_NOT_YET, _HELD, _LET_GO = "not there yet", "held", "let go"
_UNMADE = "not there before its RECOMPUTE"
_EVICTED, _OFFLOADED = "evicted", "offloaded"
_BACK = "back and not used"
_NOT_HERE, _GUEST, _RETURNED = "not here", "here", "given back"

_RULES: dict[ActionKind, tuple[tuple[str, ...], str]] = {
    ActionKind.FORWARD: ((_NOT_YET,), _HELD),
    ActionKind.RECOMPUTE: ((_UNMADE,), _HELD),
    ActionKind.BACKWARD_INPUT: ((_HELD, _BACK), _HELD),
    ActionKind.BACKWARD_WEIGHT: ((_HELD, _BACK), _LET_GO),
    ActionKind.BACKWARD: ((_HELD, _BACK), _LET_GO),
    ActionKind.EVICT: ((_HELD,), _EVICTED),
    ActionKind.OFFLOAD: ((_HELD,), _OFFLOADED),
    ActionKind.LOAD: ((_EVICTED,), _BACK),
    ActionKind.RELOAD: ((_OFFLOADED,), _BACK),
    ActionKind.ACCEPT: ((_NOT_HERE, _RETURNED), _GUEST),
    ActionKind.RETURN: ((_GUEST,), _RETURNED),
    ActionKind.AWAIT: ((_EVICTED, _OFFLOADED, _RETURNED), ""),
}
"""In which states an action may find a microbatch of a stage on its rank, and how it leaves that;
an AWAIT as it was. The rank that runs the stage begins with one that is not there yet, its partner
with one that is not here.
"""

_OUT = (ActionKind.EVICT, ActionKind.ACCEPT)
"""Both ends of what goes from the rank that runs a stage to its partner."""


def _right_ranks(action: Action, schedule: Schedule) -> tuple[int, ...]:
    """The ranks in whose rows an action may stand."""
    home = schedule.placement[action.stage]
    if action.kind in (ActionKind.ACCEPT, ActionKind.RETURN):
        return (schedule.partner(home),)
    return (home, schedule.partner(home)) if action.kind is ActionKind.AWAIT else (home,)


def _move_faults(schedule: Schedule) -> Iterator[_Fault]:
    """Whatever is wrong with moves and recomputation, of actions that are on their ranks."""
    rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    moved = set()
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            key = rank, action.stage, action.microbatch
            if action.kind in _RULES and 0 <= action.stage < schedule.stages:
                rows[key].append(place)
            if action.kind.is_memory:
                moved.add(key)
    for key, places in rows.items():
        if key in moved:
            yield from _state_faults(schedule, *key, places)
    for low in range(len(schedule.ranks) // 2):
        yield from _order_faults(schedule, low, schedule.partner(low))


def _state_faults(
    schedule: Schedule, rank: int, stage: int, microbatch: int, places: Sequence[int]
) -> Iterator[_Fault]:
    """What happens to a microbatch of a stage on a rank, action by action."""
    actions = [schedule.ranks[rank][place] for place in places]
    again = any(action.kind is ActionKind.RECOMPUTE for action in actions)
    alone = schedule.partner(rank) == rank
    state = _NOT_YET if schedule.placement[stage] == rank else _NOT_HERE
    before: tuple[Cell, ...] = ()
    for place, action in zip(places, actions, strict=True):
        here = rank, place
        expected, after = _RULES[action.kind]
        if action.kind is ActionKind.EVICT and alone:
            yield _Fault(f"{action}: rank {rank} has no partner to send it to", (here,))
        if state not in expected:
            wanted = " or ".join(expected)
            found = f"{action} finds what is {state}, expected {wanted}"
            yield _Fault(found, (*before, here))
        state = _UNMADE if again and action.kind is ActionKind.FORWARD else after or state
        before = (here,)
    if state in (_EVICTED, _OFFLOADED):
        left = f"{actions[-1]} leaves what is {state}, and nothing brings it back"
        yield _Fault(left, before)


def _order_faults(schedule: Schedule, low: int, high: int) -> Iterator[_Fault]:
    """Two partners begin every transfer between them in one order, or one waits for ever."""
    ends = [
        [
            ((action.stage, action.microbatch, action.kind in _OUT), place)
            for place, action in enumerate(schedule.ranks[rank])
            if action.kind.is_shared
        ]
        for rank in (low, high)
    ]
    for mine, theirs in zip_longest(*ends, fillvalue=(None, -1)):
        if mine[0] != theirs[0]:
            one, other = (
                str(schedule.ranks[rank][place]) if what is not None else "its end"
                for rank, (what, place) in ((low, mine), (high, theirs))
            )
            cells = ((low, mine[1]), (high, theirs[1]))
            yield _Fault(
                f"rank {low} comes to {one} where its partner, rank {high}, comes to {other}; two "
                "ranks list the transfers between them in one order",
                tuple(cell for cell in cells if cell[1] >= 0),
            )
            return


# --- as people see them ---------------------------------------------------------------------------


def _report(schedule: Schedule, faults: list[_Fault]) -> str:
    """The faults, numbered, above the grid on which the numbers stand under the faulty cells."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    if len(faults) > _MOST:
        count, faults = f"more than {_MOST} faults", faults[:_MOST]
    lines = [f"{number}. {fault.text}" for number, fault in enumerate(faults, 1)]
    head = f"illegal schedule ({describe(schedule)}), {count}:"
    rows, columns = lay_out(schedule)
    numbers: dict[Cell, list[int]] = defaultdict(list)
    for number, fault in enumerate(faults, 1):
        for rank, position in fault.cells:
            places = columns[rank]
            behind = places[-1] + 1 if places else 0
            column = places[position] if position < len(places) else behind
            numbers[rank, column].append(number)
    marks = {cell: "^" + ",".join(map(str, found)) for cell, found in numbers.items()}
    return "\n".join([head, *lines, format_grid(rows, marks, widest=_WIDEST)])
