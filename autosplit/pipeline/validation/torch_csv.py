"""Schedules as CSV files of torch.distributed.pipelining, in and out.

A line is a rank, a cell an action in the text form of ``Action``. In the form ``"compute_only"``
empty cells are waits; ``"compute_comms"`` lists sends and receives as well, and where sharded
parameters are gathered and freed, which torch places itself in the other. Both are torch's, which
knows no actions of memory; ``"with_memory"`` is ours and holds those. Torch's
``_PipelineScheduleRuntime._load_csv`` reads both; from 2.15 on it wants ``0WAIT_SEND_F1`` for
``0SEND_F1`` in the latter, where the rank may wait for the send to end. The runtime of torch 2.11
runs no schedule over gloo in which neighbouring stages lie on one rank, whoever made it. A file is
read by what is in it.

Sends and receives stand in an order in which none waits for another in a circle (see
``add_communication``). Between two ranks, operations run in the order in which each enqueued them,
and a send may not be complete before its receive is posted. So every send and its receive are put
down in one go, behind the action that makes the result: all ranks then see the messages in one
common order.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.routes import ends_of, parcels_of, result_of
from autosplit.pipeline.schedule.schedule import LARGEST, Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.playing import in_one_order
from autosplit.text.figures import few
from autosplit.text.files import read_text, writing
from autosplit.torch_internals.distributed import csv_has_send_waits

from .validate import validate


def add_communication(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Per rank, its actions with sends and receives between them.

    ``sSEND_Fm`` sends the outputs of stage s for microbatch m, ``sRECV_Fm`` receives what stage s
    takes; likewise with B for gradients. All follow the order of ``in_one_order``.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    feeds = Feeds(schedule.stages)
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    done = [0] * len(rows)
    for rank, action in in_one_order(schedule, feeds):
        rows[rank].append(action)
        done[rank] += 1
        for parcel in parcels_of(result_of(action), feeds):
            source, target = ends_of(parcel, schedule)
            if source != target:
                rows[source].append(parcel.send)
                rows[target].append(parcel.receive)
    ends = zip(schedule.ranks, done, strict=True)
    stuck = [str(row[count]) for row, count in ends if count < len(row)]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks: {', '.join(stuck)} wait")
    return tuple(map(tuple, rows))


TORCH_FORMATS = ("compute_only", "compute_comms")
FORMATS = (*TORCH_FORMATS, "with_memory")

WAITS = {
    ActionKind.SEND_F: ActionKind.WAIT_SEND_F,
    ActionKind.SEND_B: ActionKind.WAIT_SEND_B,
}
"""Of sends, where they are waited for."""

_BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)
COMPUTED = {
    ActionKind.RECV_F: (ActionKind.FORWARD,),
    ActionKind.SEND_F: (ActionKind.FORWARD,),
    ActionKind.RECV_B: _BACKWARDS,
    ActionKind.SEND_B: _BACKWARDS,
}
"""What takes or makes a message, of the same stage and microbatch."""

# A forward and a backward that torch may run at the same time.
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_csv(
    schedule: Schedule,
    path: str | Path,
    form: str = "compute_only",
    *,
    send_waits: bool | None = None,
) -> None:
    """Write a schedule for torch's ``_load_csv(path, format=form)``, or for ``read_csv``.

    Args:
        schedule: what to write.
        path: the file.
        form: ``"compute_only"`` or ``"compute_comms"``, which torch reads; or ``"with_memory"``.
        send_waits: whether ``"compute_comms"`` lists where sends are waited for, as torch 2.15
            wants it and 2.14 cannot read it; None: as the torch at hand has it.

    Raises:
        ScheduleError: an unknown form, or actions of memory, which torch does not have.
        OutputError: the file cannot be written.
    """
    if form not in FORMATS:
        raise ScheduleError(f"unknown form {form!r}; known: {', '.join(FORMATS)}")
    if form == "with_memory":
        rows = [[*map(str, row)] for row in schedule.ranks]
    elif form == "compute_only":
        rows = rows_for_torch(schedule)
    else:
        check_memory(schedule)
        waits = csv_has_send_waits() if send_waits is None else send_waits
        listed = add_communication(schedule)
        rows = [[*map(str, _with_waits(row) if waits else row)] for row in listed]
    with writing(path), Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def check_memory(schedule: Schedule) -> None:
    """Refuse what torch cannot run.

    Raises:
        ScheduleError: the schedule has actions of memory.
    """
    memory = [action for row in schedule.ranks for action in row if action.kind.is_memory]
    if memory:
        raise ScheduleError(
            f"{schedule.name!r} has actions of memory such as {memory[0]}, which torch does not "
            "have: take the schedule without them, or run it with PipelineTrainer, for which "
            "write_csv(..., form='with_memory') writes it"
        )


def rows_for_torch(schedule: Schedule) -> list[list[str]]:
    """Per rank its actions as torch reads them.

    Raises:
        ScheduleError: see ``check_memory``.
    """
    check_memory(schedule)
    return [[*map(str, row)] for row in schedule.ranks]


def _with_waits(row: Sequence[Action]) -> Iterator[Action]:
    """The actions, and a wait for every send where the other rank has surely received: behind the
    stage's own backward, which needs what came back, or at the end.
    """
    pending: dict[Action, None] = {}
    for action in row:
        yield action
        if action.kind in WAITS:
            pending[replace(action, kind=WAITS[action.kind])] = None
        wait = replace(action, kind=ActionKind.WAIT_SEND_F)
        if action.kind in _BACKWARDS and wait in pending:
            del pending[wait]
            yield wait
    yield from pending


def read_csv(path: str | Path, *, name: str | None = None) -> Schedule:
    """Read a schedule that torch or ``write_csv`` has written.

    A forward and a backward that torch may overlap run one after the other. Sends and receives, if
    there are any, must be those that the actions need; they follow from the actions anyway and are
    left out, as are gathers and reductions, and waits for sends.

    Args:
        path: the file.
        name: the schedule's name; None takes the file's.

    Raises:
        ScheduleError: a file that cannot be read or is no CSV file, text that is no action, more
            than ``schedule.LARGEST`` actions, missing or unneeded sends and receives, or an illegal
            schedule.
    """
    return read_actions(path, name)[0]


def read_actions(
    path: str | Path, name: str | None = None
) -> tuple[Schedule, Sequence[Sequence[Action]] | None]:
    """As ``read_csv``, with all that a file lists for each rank, if it lists sends and receives."""
    path = Path(path)
    rows = _rows(path)
    schedule = _schedule(path.stem if name is None else name, rows)
    validate(schedule)
    if not any(action.kind.is_message for row in rows for action in row):
        return schedule, None
    _check_messages(rows, add_communication(schedule))
    return schedule, rows


def _rows(path: Path) -> list[list[Action]]:
    """The actions of every line."""
    rows: list[list[Action]] = []
    count = 0
    for cells in _cells(path):
        rows.append([])
        for cell in cells:
            rows[-1].append(Action.parse(cell))
            count += rows[-1][-1].kind.is_scheduled
            if count > LARGEST:
                raise ScheduleError(
                    f"{str(path)!r} holds more than {LARGEST:,} actions, which are all that a "
                    "schedule may have"
                )
    return rows


def _cells(path: Path) -> Iterator[list[str]]:
    """The texts of every line."""
    text = read_text(path, "a schedule", ScheduleError)
    try:
        for cells in csv.reader(io.StringIO(text, newline="")):
            yield [part for cell in cells for part in _texts(cell)]
    except csv.Error as error:
        raise ScheduleError(f"{str(path)!r} is no CSV file: {error}") from error


def _texts(cell: str) -> list[str]:
    """The actions of one cell: none, one, or the two of an overlap."""
    overlap = _OVERLAP.fullmatch(cell.strip())
    parts = overlap[1].split(";") if overlap else [cell]
    return [part.strip() for part in parts if part.strip()]


def _schedule(name: str, rows: Sequence[Sequence[Action]]) -> Schedule:
    """What ``rows`` schedule; a stage is placed where it first runs."""
    ranks = tuple(tuple(action for action in row if action.kind.is_scheduled) for row in rows)
    every = ((rank, action) for rank, row in enumerate(ranks) for action in row)
    actions = [(rank, action) for rank, action in every if action.kind.is_compute]
    if not actions:
        raise ScheduleError(f"{name!r} holds no F, I, W or B")
    homes: dict[int, int] = {}
    for rank, action in actions:
        homes.setdefault(action.stage, rank)
    if len(homes) <= max(homes):
        missing = [str(stage) for stage in range(len(homes)) if stage not in homes]
        raise ScheduleError(
            f"{name!r} has stages up to {max(homes)}, but never runs {few(missing, 9)}"
        )
    return Schedule(
        name,
        len(homes),
        1 + max(action.microbatch for _, action in actions),
        ranks,
        tuple(homes[stage] for stage in range(len(homes))),
        any(action.kind is ActionKind.BACKWARD_INPUT for _, action in actions),
    )


def _check_messages(rows: Sequence[Sequence[Action]], complete: Sequence[Sequence[Action]]) -> None:
    """Every rank must list the sends and receives that it needs, and no other; each receive before
    what takes it, and each send behind what makes it.
    """
    for rank, ends in enumerate(zip(rows, complete, strict=True)):
        listed, needed = (
            Counter(str(action) for action in row if action.kind.is_message) for row in ends
        )
        if listed != needed:
            lacks = few(sorted(needed - listed), 9) or "nothing"
            excess = few(sorted(listed - needed), 9) or "nothing"
            raise ScheduleError(
                f"rank {rank} must send and receive what its actions need, each once: it lacks "
                f"{lacks}, and has {excess} in excess"
            )
        places = {action: place for place, action in enumerate(rows[rank])}
        for action, place in places.items():
            for kind in COMPUTED.get(action.kind, ()):
                computed, sends = replace(action, kind=kind), action.kind in WAITS
                at = places.get(computed, place)
                if place != at and (place < at) is sends:
                    raise ScheduleError(
                        f"rank {rank} lists {action} {'before' if sends else 'behind'} "
                        f"{computed}, which {'makes' if sends else 'takes'} it"
                    )
