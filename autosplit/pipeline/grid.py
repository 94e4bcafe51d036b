"""Schedules for people: ranks as rows, time slots as columns, faulty cells marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.simulation.replay import replay, unmade

Cell = tuple[int, int]
"""A place in a grid: row and column."""

IDLE = "."
ERROR = "<-- ERROR HERE"
_CONTEXT = 6  # columns kept on each side of a mark when a wide grid is shortened


def format_grid(
    rows: Sequence[Sequence[str]],
    marks: Mapping[Cell, str] | None = None,
    *,
    widest: int | None = None,
) -> str:
    """Draw a grid of ranks (rows) by time slots (columns).

    Args:
        rows: per rank, the text of each slot; ``""`` is an idle slot. Rows may differ in length.
        marks: text to set under a cell, as ``"^1"``; its line ends with ``<-- ERROR HERE``.
        widest: a grid of more columns shows only those near a mark, or without marks only the
            first ones; None shows all.

    Returns:
        The lines, without a final newline.
    """
    marks = marks or {}
    width = max([len(row) for row in rows] + [column + 1 for _, column in marks], default=0)
    columns = _columns(width, marks, widest)
    table: list[list[str]] = [["slot", *_pick(columns, [str(slot) for slot in range(width)])]]
    for number, row in enumerate(rows):
        cells = [row[slot] if slot < len(row) else "" for slot in range(width)]
        table.append([f"rank {number}", *_pick(columns, [cell or IDLE for cell in cells])])
        under = [marks.get((number, slot), "") for slot in range(width)]
        if any(under):
            table.append(["", *_pick(columns, under, gap=""), ERROR])
    widths = [  # ERROR hangs over the edge and must not widen a column
        max(len(cell) for cell in column if cell != ERROR)
        for column in zip_longest(*table, fillvalue="")
    ]
    return "\n".join(
        "  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=False)).rstrip()
        for line in table
    )


def format_schedule(schedule: Schedule) -> str:
    """The schedule on a grid in which every action takes one slot, under a line of its sizes.

    Actions that can never run stand behind all that can.
    """
    rows, _ = lay_out(schedule)
    return f"{describe(schedule)}\n{format_grid(rows)}"


def describe(schedule: Schedule) -> str:
    """Name and sizes in one line."""
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, "
        f"{len(schedule.ranks)} ranks"
    )


def lay_out(schedule: Schedule) -> tuple[list[list[str]], list[list[int]]]:
    """The rows of a grid, and the column of every action of each rank.

    Works for illegal schedules too: needs that nothing meets are taken as met, and what a deadlock
    keeps from running is set behind the last action that runs.
    """
    run = replay(schedule, lambda action: 1.0, given=unmade(schedule))
    end = max((round(times[-1][1]) for times in run.times if times), default=0)
    rows: list[list[str]] = []
    columns: list[list[int]] = []
    for row, times in zip(schedule.ranks, run.times, strict=True):
        places = [round(start) for start, _ in times]
        places += range(end, end + len(row) - len(times))
        cells = [""] * (places[-1] + 1 if places else 0)
        for action, place in zip(row, places, strict=True):
            cells[place] = str(action)
        rows.append(cells)
        columns.append(places)
    return rows, columns


def _columns(width: int, marks: Mapping[Cell, str], widest: int | None) -> list[int | None]:
    """The columns to show; None stands for columns left out."""
    if widest is None or width <= widest:
        return list(range(width))
    if not marks:
        return [*range(widest), None]
    near = {column + offset for _, column in marks for offset in range(-_CONTEXT, _CONTEXT + 1)}
    shown: list[int | None] = []
    for column in range(width):
        if column in near:
            shown.append(column)
        elif not shown or shown[-1] is not None:
            shown.append(None)
    return shown


def _pick(columns: Sequence[int | None], cells: Sequence[str], gap: str = "...") -> list[str]:
    return [gap if column is None else cells[column] for column in columns]
