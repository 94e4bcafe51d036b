"""Draw schedules: ranks as rows, time slots as columns, faulty cells marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest

from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.playing import replay

Cell = tuple[int, int]
"""Row and column of a grid."""

IDLE = "."
ERROR = "<-- ERROR HERE"
_CONTEXT = 6  # columns kept on each side of a mark when a wide grid is shortened

Row = Mapping[int, str]
"""The text of the slots of a rank that are not idle."""


def format_grid(
    rows: Sequence[Row],
    marks: Mapping[Cell, str] | None = None,
    *,
    widest: int | None = None,
    notes: Mapping[int, str] | None = None,
) -> str:
    """Draw a grid of ranks (rows) by time slots (columns).

    Args:
        rows: per rank, the text of each slot in which it is not idle.
        marks: maps a cell to the text under it, such as ``"^1"``. The text's line ends with ``<--
            ERROR HERE``, or with the note of the row.
        widest: the most columns and rows to show. Columns and rows near a mark are shown; without
            marks, the first ones. None shows all.
        notes: maps a row to the text at the end of the line under it.

    Returns:
        The lines, without a final newline.
    """
    marks = marks or {}
    under: dict[int, dict[int, str]] = {}
    for (rank, slot), mark in marks.items():
        under.setdefault(rank, {})[slot] = mark
    ends = [max(row) + 1 for row in (*rows, *under.values()) if row]
    width = max(ends, default=0)
    near = {column + offset for _, column in marks for offset in range(-_CONTEXT, _CONTEXT + 1)}
    columns = _shown(width, near.intersection(range(width)), widest)
    slots = {column: str(column) for column in columns if column is not None}
    table: list[list[str]] = [["slot", *_pick(columns, slots)]]
    hanging: set[str] = set()
    for number in _shown(len(rows), under, widest):
        if number is None:
            table.append(["..."])
            continue
        texts = {slot: text or IDLE for slot, text in rows[number].items()}
        table.append([f"rank {number}", *_pick(columns, texts, idle=IDLE)])
        if number in under:
            note = ERROR if notes is None else notes.get(number, "")
            table.append(["", *_pick(columns, under[number], gap=""), note])
            hanging.add(note)
    widths = [  # notes hang over the edge and must not widen a column
        max((len(cell) for cell in column if cell not in hanging), default=0)
        for column in zip_longest(*table, fillvalue="")
    ]
    return "\n".join(
        "  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=False)).rstrip()
        for line in table
    )


def format_schedule(schedule: Schedule) -> str:
    """The schedule on a grid in which every action takes one slot, below a line with its sizes.

    Actions that can never run come after all others.
    """
    rows, _ = lay_out(schedule)
    return f"{describe(schedule)}\n{format_grid(rows)}"


def describe(schedule: Schedule) -> str:
    """A schedule's name and its numbers of stages, microbatches and ranks, in one line."""
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, "
        f"{len(schedule.ranks)} ranks"
    )


def lay_out(schedule: Schedule) -> tuple[list[dict[int, str]], list[list[int]]]:
    """Return (rows of a grid: column -> text; per rank, the column of every action).

    The schedule may be illegal. Results that no action computes count as present, and actions that
    a deadlock blocks come after the last action that runs.
    """
    run = replay(schedule)
    end = max((round(times[-1][1]) for times in run.times if times), default=0)
    rows: list[dict[int, str]] = []
    columns: list[list[int]] = []
    for row, times in zip(schedule.ranks, run.times, strict=True):
        places = [round(start) for start, _ in times]
        places += range(end, end + len(row) - len(times))
        rows.append(dict(zip(places, map(str, row), strict=True)))
        columns.append(places)
    return rows, columns


def _shown(count: int, wanted: Iterable[int], widest: int | None) -> list[int | None]:
    """The numbers of the grid's rows or columns to show, from 0; None stands for a gap.

    Args:
        count: the number of rows or columns.
        wanted: those to show if not all are shown; empty: the first ones.
        widest: the most rows or columns to show; None for all.
    """
    if widest is None or count <= widest:
        return list(range(count))
    shown: list[int | None] = []
    for previous, number in pairwise([-1, *(sorted(wanted) or range(widest)), count]):
        shown += [number] if number == previous + 1 else [None, number]
    return shown[:-1]


def _pick(columns: Sequence[int | None], texts: Row, idle: str = "", gap: str = "...") -> list[str]:
    return [gap if column is None else texts.get(column, idle) for column in columns]
