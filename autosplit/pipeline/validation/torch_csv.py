"""Read and write the CSV files of torch.distributed.pipelining.

Each line is a rank, and each cell an action in the text form of ``Action``; empty cells are waits.
Torch's ``_PipelineScheduleRuntime._load_csv(path, format="compute_only")`` reads these files,
except memory actions, which torch does not have, and UNSHARD, RESHARD and REDUCE_GRAD, which it
adds itself. Torch's own files may also list UNSHARD, RESHARD and REDUCE_GRAD, and sends and
receives (``"compute_comms"``). autosplit derives messages from the other actions, and ``autosplit
check`` validates listed messages. Over gloo, the runtime of torch 2.11 cannot run schedules that
place neighbouring stages on one rank.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.routes import (
    StageDataflow,
    outgoing_messages,
    result_of,
    sender_and_receiver,
)
from autosplit.pipeline.schedule.schedule import LARGEST, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.playing import global_order
from autosplit.text.figures import few
from autosplit.text.files import read_text, writing

from .validate import validate


def add_communication(schedule: Schedule) -> list[list[Action]]:
    """The actions of each rank of a legal schedule, with sends and receives between them.

    ``sSEND_Fm`` sends the outputs of stage s for microbatch m, and ``sRECV_Fm`` receives the inputs
    of stage s. ``SEND_B`` and ``RECV_B`` send and receive gradients. All actions are in the order
    of ``global_order``.
    """
    dataflow = StageDataflow(schedule.stages)
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    for rank, action in global_order(schedule, dataflow):
        rows[rank].append(action)
        for message in outgoing_messages(result_of(action), dataflow):
            source, target = sender_and_receiver(message, schedule)
            if source != target:
                rows[source].append(message.send)
                rows[target].append(message.receive)
    return rows


# A forward and a backward that torch may run at the same time.
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule for ``read_csv``, and for torch's ``_load_csv``.

    Args:
        schedule: the schedule.
        path: the file.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path), Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(schedule.ranks)


def check_memory(schedule: Schedule) -> None:
    """Refuse a schedule with memory actions, which torch cannot run.

    Raises:
        ScheduleError: the schedule moves or recomputes activations.
    """
    memory = [action for row in schedule.ranks for action in row if action.kind.is_memory]
    if memory:
        raise ScheduleError(
            f"{schedule.name!r} has memory actions such as {memory[0]}, which torch does not "
            "have: take the schedule without them, or run it with PipelineTrainer"
        )


def read_csv(path: str | Path, *, name: str | None = None) -> Schedule:
    """Read a schedule that torch or ``write_csv`` has written.

    A forward and a backward that torch may overlap run one after the other. Sends, receives, and
    waits for sends are left out. UNSHARD, RESHARD and REDUCE_GRAD stay where the file lists them.

    Args:
        path: the file.
        name: the schedule's name; None: the file's name.

    Raises:
        ScheduleError: the file cannot be read or is not CSV, a cell is not an action, there are
            more than ``schedule.LARGEST`` actions, or the schedule is illegal.
    """
    return read_actions(path, name)[0]


def read_actions(
    path: str | Path, name: str | None = None
) -> tuple[Schedule, Sequence[Sequence[Action]] | None]:
    """Return (schedule as from ``read_csv``, all listed actions of each rank). The listed actions
    are None if the file lists no sends and receives.
    """
    path = Path(path)
    rows = _rows(path)
    schedule = _schedule(path.stem if name is None else name, rows)
    validate(schedule)
    listed = any(action.kind.is_message for row in rows for action in row)
    return schedule, rows if listed else None


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
                    f"{str(path)!r} has more than {LARGEST:,} actions, the limit of a schedule"
                )
    return rows


def _cells(path: Path) -> Iterator[list[str]]:
    """The cells of each line, as texts."""
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
    """The schedule with these rows; a stage is placed on the rank that first runs it."""
    ranks = tuple(tuple(action for action in row if action.kind.is_scheduled) for row in rows)
    pairs = ((rank, action) for rank, row in enumerate(ranks) for action in row)
    actions = [(rank, action) for rank, action in pairs if action.kind.is_compute]
    if not actions:
        raise ScheduleError(
            f"{name!r} has no F, I, W or B: expected a line of actions such as 0F0 for each rank"
        )
    homes = {action.stage: rank for rank, action in reversed(actions)}
    if len(homes) <= max(homes):
        missing = [str(stage) for stage in range(len(homes)) if stage not in homes]
        raise ScheduleError(
            f"{name!r} has stages up to {max(homes)}, but no action of stage {few(missing, 9)}: "
            "stages must be numbered without gaps"
        )
    return Schedule(
        name,
        len(homes),
        1 + max(action.microbatch for _, action in actions),
        ranks,
        tuple(homes[stage] for stage in range(len(homes))),
        any(action.kind is ActionKind.BACKWARD_INPUT for _, action in actions),
    )
