"""Check that a schedule is legal. All faults are reported at once, on the grid."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from autosplit.errors import DeadlockError, ScheduleError
from autosplit.pipeline.schedule.schedule import (
    BACKWARDS,
    LARGEST,
    METHODS,
    Action,
    ActionKind,
    Schedule,
)
from autosplit.pipeline.simulation.playing import replay

from .grid import Cell, describe, format_grid, lay_out

_WIDEST = 60  # slots and ranks in an error's grid; a larger one shows those near a fault
_CIRCLE = "deadlock: "
_MOST = 50  # faults to report; more of them would add nothing new


@dataclass(frozen=True)
class _Fault:
    """A fault, and its cells as (rank, position in the row). The position after the last action
    stands for a missing action.
    """

    text: str
    cells: tuple[Cell, ...] = ()


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run, or would not compute one training step.

    In a legal schedule,

    - every stage runs every F once, and for every microbatch either one B, or one I and one W, on
      the rank that holds the stage;
    - running the rows in order cannot deadlock, with F before I (or B) before W;
    - the activations of a microbatch are in at most one move at a time, and are back before an
      action uses them; partners list the transfers between them in the same order;
    - a microbatch is recomputed at most once, before its backward, and is not moved before its
      RECOMPUTE;
    - a stage's gradients are reduced after all of its backwards.

    Raises:
        ScheduleError: lists at most 50 faults and shows them on the grid; a DeadlockError if all
            are deadlocks.
    """
    count = sum(map(len, schedule.ranks))
    if count > LARGEST:
        raise ScheduleError(
            f"{describe(schedule)}, {count:,} actions: more than the limit of {LARGEST:,}. "
            "Use fewer and larger microbatches"
        )
    # Lazily, because a schedule may name a billion microbatches and run none of them.
    faults = list(islice(_sizes(schedule), _MOST + 1))
    if not faults:  # the other checks index by stage and rank
        checks = [
            _strays(schedule),
            _counts(schedule),
            _early_reductions(schedule),
            _deadlocks(schedule),
            _move_faults(schedule),
        ]
        faults = list(islice(chain(*checks), _MOST + 1))
    if faults:
        waits = all(fault.text.startswith(_CIRCLE) for fault in faults)
        raise (DeadlockError if waits else ScheduleError)(_report(schedule, faults))


def _sizes(schedule: Schedule) -> Iterator[_Fault]:
    """Yield the faults in the counts of a schedule, and in the placement of its stages."""
    for noun, count in (("stages", schedule.stages), ("microbatches", schedule.microbatches)):
        if count < 1:
            yield _Fault(f"{noun} must be at least 1, got {count}")
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
    """The reason why ``action`` cannot exist in this pipeline; None if it can."""
    if not action.kind.is_scheduled:
        return (
            f"{action} is not an action that a schedule lists: F, I, W, B, actions of memory, and "
            "UNSHARD, RESHARD, REDUCE_GRAD"
        )
    for noun, value, count in (
        ("stage", action.stage, schedule.stages),
        ("microbatch", action.microbatch, schedule.microbatches),
    ):
        if not 0 <= value < count:
            return f"{action}: no {noun} {value}; expected 0 to {count - 1}"
    return None


def _strays(schedule: Schedule) -> Iterator[_Fault]:
    """Yield the actions that do not exist in this pipeline, or that are listed on a wrong rank."""
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
    """Yield the actions that are missing or repeated: each microbatch of a stage needs one F, and
    one B or one I and one W.
    """
    cells_of: dict[Action, list[Cell]] = defaultdict(list)
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            cells_of[action].append((rank, position))
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            actions = [Action(stage, kind, microbatch) for kind in METHODS]
            forward, inputs, weights, full = actions
            cells = {action: tuple(cells_of.get(action, ())) for action in actions}
            home = schedule.placement[stage]
            end = ((home, len(schedule.ranks[home])),)  # after the last action
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
            for action, places in cells.items():
                if len(places) > 1:
                    yield _Fault(f"{action} runs {len(places)} times, expected once", places)


def _early_reductions(schedule: Schedule) -> Iterator[_Fault]:
    """Yield each REDUCE_GRAD before the last backward of its stage, where gradients are partial."""
    for rank, row in enumerate(schedule.ranks):
        last = {action.stage: place for place, action in enumerate(row) if action.kind in BACKWARDS}
        for place, action in enumerate(row):
            if action.kind is ActionKind.REDUCE_GRAD and (end := last.get(action.stage, 0)) > place:
                text = f"{action} is before {row[end]}, whose gradients it would leave out"
                yield _Fault(text, ((rank, place), (rank, end)))


def _deadlocks(schedule: Schedule) -> Iterator[_Fault]:
    """Yield cycles of ranks that wait for each other. Missing actions are found by ``_counts``."""
    run = replay(schedule)
    for circle in run.cycles():
        ranks = [wait.rank for wait in circle if wait.rank < wait.ranks]
        cells = tuple((rank, len(run.times[rank])) for rank in ranks)
        yield _Fault(f"{_CIRCLE}{'; '.join(map(str, circle))}", cells)


# --- moves and recomputation ----------------------------------------------------------------------

_NOT_YET, _RESIDENT, _FREED = "not there yet", "held", "let go"
_UNMADE = "not there before its RECOMPUTE"
_EVICTED, _OFFLOADED = "evicted", "offloaded"
_RELOADED = "back and not used"
_NOT_HERE, _GUEST, _RETURNED = "not here", "here", "given back"

_RULES: dict[ActionKind, tuple[tuple[str, ...], str]] = {
    ActionKind.FORWARD: ((_NOT_YET,), _RESIDENT),
    ActionKind.RECOMPUTE: ((_UNMADE,), _RESIDENT),
    ActionKind.BACKWARD_INPUT: ((_RESIDENT, _RELOADED), _RESIDENT),
    ActionKind.BACKWARD_WEIGHT: ((_RESIDENT, _RELOADED), _FREED),
    ActionKind.BACKWARD: ((_RESIDENT, _RELOADED), _FREED),
    ActionKind.EVICT: ((_RESIDENT,), _EVICTED),
    ActionKind.OFFLOAD: ((_RESIDENT,), _OFFLOADED),
    ActionKind.LOAD: ((_EVICTED,), _RELOADED),
    ActionKind.RELOAD: ((_OFFLOADED,), _RELOADED),
    ActionKind.ACCEPT: ((_NOT_HERE, _RETURNED), _GUEST),
    ActionKind.RETURN: ((_GUEST,), _RETURNED),
    ActionKind.AWAIT: ((_EVICTED, _OFFLOADED, _RETURNED), ""),
}
"""By kind, the states of a microbatch in which an action may run, and the state after it. An AWAIT
leaves the state as it is. A microbatch begins as "not there yet" on the rank of its stage, and as
"not here" on the partner.
"""

_OUT = (ActionKind.EVICT, ActionKind.ACCEPT)
"""Both ends of a move from the rank of a stage to its partner."""


def _right_ranks(action: Action, schedule: Schedule) -> tuple[int, ...]:
    """The ranks whose rows may have an action."""
    home = schedule.placement[action.stage]
    if action.kind in (ActionKind.ACCEPT, ActionKind.RETURN):
        return (schedule.partner(home),)
    return (home, schedule.partner(home)) if action.kind is ActionKind.AWAIT else (home,)


def _move_faults(schedule: Schedule) -> Iterator[_Fault]:
    """Yield the faults of moves and recomputation, for actions that are on their ranks."""
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
            rank, stage, _ = key
            yield from _state_faults(schedule, rank, stage, places)
    for low in range(len(schedule.ranks) // 2):
        yield from _order_faults(schedule, low, schedule.partner(low))


def _state_faults(
    schedule: Schedule, rank: int, stage: int, places: Sequence[int]
) -> Iterator[_Fault]:
    """Yield the faults of one microbatch of a stage on a rank, action by action."""
    actions = [schedule.ranks[rank][place] for place in places]
    again = any(action.kind is ActionKind.RECOMPUTE for action in actions)
    alone = schedule.partner(rank) == rank
    state = _NOT_YET if schedule.placement[stage] == rank else _NOT_HERE
    previous: tuple[Cell, ...] = ()
    for place, action in zip(places, actions, strict=True):
        here = rank, place
        expected, after = _RULES[action.kind]
        if action.kind is ActionKind.EVICT and alone:
            yield _Fault(f"{action}: rank {rank} has no partner to send it to", (here,))
        if state not in expected:
            wanted = " or ".join(expected)
            text = f"{action}: the activations are {state}, expected {wanted}"
            yield _Fault(text, (*previous, here))
        state = _UNMADE if again and action.kind is ActionKind.FORWARD else after or state
        previous = (here,)
    if state in (_EVICTED, _OFFLOADED):
        left = f"{actions[-1]} leaves the activations {state}, and nothing brings them back"
        yield _Fault(left, previous)


def _order_faults(schedule: Schedule, low: int, high: int) -> Iterator[_Fault]:
    """Yield the first transfer that two partners list in different orders, because it would
    deadlock.
    """
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
                str(schedule.ranks[rank][place]) if transfer is not None else "its end"
                for rank, (transfer, place) in ((low, mine), (high, theirs))
            )
            cells = ((low, mine[1]), (high, theirs[1]))
            yield _Fault(
                f"rank {low} has {one} where its partner, rank {high}, has {other}; partners must "
                "list the transfers between them in one order",
                tuple(cell for cell in cells if cell[1] >= 0),
            )
            return


# --- report ---------------------------------------------------------------------------------------


def _report(schedule: Schedule, faults: list[_Fault]) -> str:
    """Text with the numbered faults, then a grid with their numbers under the faulty cells."""
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
            beyond = places[-1] + 1 if places else 0
            column = places[position] if position < len(places) else beyond
            numbers[rank, column].append(number)
    marks = {cell: "^" + ",".join(map(str, faults_here)) for cell, faults_here in numbers.items()}
    return "\n".join([head, *lines, format_grid(rows, marks, widest=_WIDEST)])
