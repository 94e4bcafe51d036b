"""Schedules as CSV files of torch.distributed.pipelining, in and out.

A line is a rank, a cell an action in the text form of ``Action``. In the form ``"compute_only"``
empty cells are waits; ``"compute_comms"`` lists sends and receives as well, and where sharded
parameters are gathered and freed, which torch places itself in the other. Both are torch's, which
knows no actions of memory; ``"with_memory"`` is ours and holds those, and as ``0MOVED4096`` in the
first row how many bytes of each microbatch stage 0 moves at most (see ``Schedule.moved``). Torch's
``_PipelineScheduleRuntime._load_csv`` reads both; from 2.15 on it wants ``0WAIT_SEND_F1`` for
``0SEND_F1`` in the latter, where the rank may wait for the send to end. The runtime of torch 2.11
runs no schedule over gloo in which neighbouring stages lie on one rank, whoever made it.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.routes import channel_of, in_one_order, parcels_of, result_of
from autosplit.pipeline.schedule.schedule import LARGEST, Schedule, without_sharding
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.text.figures import few
from autosplit.text.files import read_text, writing
from autosplit.torch_internals.distributed import csv_has_send_waits

from .validate import validate

_MESSAGES = {
    ActionKind.FORWARD: (ActionKind.SEND_F, ActionKind.RECV_F),
    ActionKind.BACKWARD_INPUT: (ActionKind.SEND_B, ActionKind.RECV_B),
}


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
        _add_messages(schedule, result_of(action), feeds, rows)
    ends = zip(schedule.ranks, done, strict=True)
    stuck = [str(row[count]) for row, count in ends if count < len(row)]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks: {', '.join(stuck)} wait")
    return tuple(map(tuple, rows))


def _add_messages(
    schedule: Schedule, result: Action, feeds: Feeds, rows: list[list[Action]]
) -> None:
    for parcel in parcels_of(result, feeds):
        channel = channel_of(parcel, schedule)
        if not channel.local:
            send, receive = _MESSAGES[result.kind]
            rows[channel.source_rank].append(Action(result.stage, send, result.microbatch))
            rows[channel.target_rank].append(
                Action(channel.target_stage, receive, result.microbatch)
            )


TORCH_FORMATS = ("compute_only", "compute_comms")
FORMATS = (*TORCH_FORMATS, "with_memory")

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
_BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)

# Reductions, which follow from the last weight gradients, and the ends of sends, which an engine of
# ours waits for by itself.
_LEFT_OUT = re.compile(r"[0-9]+((WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB][0-9]+)")
_MOVED = re.compile(r"([0-9]{1,9})MOVED([0-9]{1,18})")
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
        ScheduleError: an unknown form, two copies of the stages, which the file cannot say, or
            actions of memory, which torch does not have.
        OutputError: the file cannot be written.
    """
    _check_form(form)
    if schedule.mirror is not None:
        raise ScheduleError(
            f"{schedule.name!r} runs two copies of its stages; a CSV file has one rank a stage"
        )
    memory = [action for row in schedule.ranks for action in row if action.kind.is_memory]
    if memory and form != "with_memory":
        raise ScheduleError(
            f"{schedule.name!r} has actions of memory such as {memory[0]}, which torch's schedules "
            "do not have: write it with form='with_memory' for read_csv, or the schedule without "
            "them for torch"
        )
    if form == "with_memory":
        rows = [[*map(str, row)] for row in schedule.ranks]
        rows[0][:0] = [f"{stage}MOVED{size}" for stage, size in sorted(schedule.moved.items())]
    elif form == "compute_only":
        rows = [[*map(str, row)] for row in without_sharding(schedule).ranks]
    else:
        waits = csv_has_send_waits() if send_waits is None else send_waits
        listed = add_communication(schedule)
        rows = [[*(_with_waits(row) if waits else map(str, row))] for row in listed]
    with writing(path), Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _with_waits(row: Sequence[Action]) -> Iterator[str]:
    """The actions, and a wait for every send where the other rank has surely received: behind the
    stage's own backward, which needs what came back, or at the end.
    """
    pending: dict[Action, None] = {}
    for action in row:
        yield str(action)
        if action.kind in _SENDS:
            pending[action] = None
        sent = replace(action, kind=ActionKind.SEND_F)
        if action.kind in _BACKWARDS and sent in pending:
            del pending[sent]
            yield _wait(sent)
    yield from map(_wait, pending)


def _wait(send: Action) -> str:
    return f"{send.stage}WAIT_{send.kind.value}{send.microbatch}"


def read_csv(path: str | Path, form: str = "compute_only", *, name: str | None = None) -> Schedule:
    """Read a schedule that torch or ``write_csv`` has written.

    A forward and a backward that torch may overlap run one after the other. Sends and receives
    must be those that the actions need; they follow from the actions anyway and are left out.

    Args:
        path: the file.
        form: ``"compute_only"``, ``"compute_comms"`` or ``"with_memory"``.
        name: the schedule's name; None takes the file's.

    Raises:
        ScheduleError: an unknown form, a file that cannot be read or is no CSV file, text that is
            no action, more than ``schedule.LARGEST`` actions, missing or unneeded sends and
            receives, or an illegal schedule.
    """
    _check_form(form)
    path = Path(path)
    rows, moved = _rows(path, form)
    schedule = _schedule(path.stem if name is None else name, rows, moved)
    validate(schedule)
    _check_messages(schedule, rows, form)
    return schedule


def read_cells(path: str | Path) -> Iterator[list[str]]:
    """Per rank the texts of a file's actions, messages and where sends are waited for.

    Raises:
        ScheduleError: a file that cannot be read or is no CSV file.
    """
    text = read_text(Path(path), "a schedule", ScheduleError)
    try:
        for cells in csv.reader(io.StringIO(text, newline="")):
            yield [part for cell in cells for part in _texts(cell)]
    except csv.Error as error:
        raise ScheduleError(f"{str(path)!r} is no CSV file: {error}") from error


def _rows(path: Path, form: str) -> tuple[list[list[Action]], dict[int, int]]:
    """The actions of every line, and what stages move at most."""
    rows: list[list[Action]] = []
    moved: dict[int, int] = {}
    count = 0
    for cells in read_cells(path):
        if form == "with_memory":
            found = [match for cell in cells if (match := _MOVED.fullmatch(cell))]
            moved |= {int(each[1]): int(each[2]) for each in found}
            cells = [cell for cell in cells if not _MOVED.fullmatch(cell)]
        rows.append([Action.parse(cell) for cell in cells if not _LEFT_OUT.fullmatch(cell)])
        count += sum(action.kind.is_scheduled for action in rows[-1])
        if count > LARGEST:
            raise ScheduleError(
                f"{str(path)!r} holds more than {LARGEST:,} actions, which are all that a "
                "schedule may have"
            )
    return rows, moved


def _check_form(form: str) -> None:
    if form not in FORMATS:
        raise ScheduleError(f"unknown form {form!r}; known: {', '.join(FORMATS)}")


def _texts(cell: str) -> list[str]:
    """The actions of one cell: none, one, or the two of an overlap."""
    overlap = _OVERLAP.fullmatch(cell.strip())
    parts = overlap[1].split(";") if overlap else [cell]
    return [part.strip() for part in parts if part.strip()]


def _schedule(name: str, rows: Sequence[Sequence[Action]], moved: Mapping[int, int]) -> Schedule:
    """What ``rows`` schedule; a stage is placed where it first runs."""
    ranks = tuple(tuple(action for action in row if action.kind.is_scheduled) for row in rows)
    every = [(rank, action) for rank, row in enumerate(ranks) for action in row]
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
        partners=_partners(len(ranks), every, homes),
        moved=dict(moved),
    )


def _partners(
    ranks: int, actions: Sequence[tuple[int, Action]], homes: Mapping[int, int]
) -> tuple[int, ...] | None:
    """Who takes in what whom evicts, as far as anybody does."""
    accepts = [(rank, a) for rank, a in actions if a.kind is ActionKind.ACCEPT]
    taken = [(rank, homes[a.stage]) for rank, a in accepts if a.stage in homes]
    if not taken:
        return None
    partners = list(range(ranks))
    for rank, owner in taken:
        partners[rank], partners[owner] = owner, rank
    return tuple(partners)


def _check_messages(schedule: Schedule, rows: Sequence[Sequence[Action]], form: str) -> None:
    """Every rank must list the sends and receives that it needs, and no other."""
    complete = add_communication(schedule)
    for rank, row in enumerate(rows):
        memory = [action for action in row if action.kind.is_memory]
        if memory and form != "with_memory":
            raise ScheduleError(
                f"rank {rank} lists {memory[0]}, which form={form!r} does not have: read the file "
                "with form='with_memory'"
            )
        listed = sorted(str(action) for action in row if not action.kind.is_scheduled)
        if form != "compute_comms":
            if listed:
                raise ScheduleError(
                    f"rank {rank} lists {listed[0]}, which form={form!r} does not have: "
                    "read the file with form='compute_comms'"
                )
            continue
        needed = sorted(str(action) for action in complete[rank] if not action.kind.is_scheduled)
        if listed != needed:
            lacks = few(sorted(set(needed) - set(listed)), 9) or "nothing"
            excess = few(sorted(set(listed) - set(needed)), 9) or "nothing"
            raise ScheduleError(
                f"rank {rank} must send and receive what its actions need, each once: it lacks "
                f"{lacks}, and has {excess} in excess"
            )
