"""What was aimed at, and whether it was met, from the rows alone."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autosplit.text.figures import quartiles, ratios

from ..results import Rows
from .contenders import COMPILED, ENGINE, INDUCTOR, OURS, TORCH, UNDONATED

EAGER = (TORCH, OURS, ENGINE)

Cell = Mapping[str, dict[str, Any]]
"""The rows of one schedule and M, by contender."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of one cell, and what it should be.

    Attributes:
        cell: which schedule and M.
        value: nan if there is none.
        low, high: its quartiles over the rounds; both the value where it is no time.
        target: what it should be.
        most: whether the target is the most, rather than the least.
    """

    cell: str
    value: float
    low: float
    high: float
    target: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether it is what it should be."""
        return self.value <= self.target if self.most else self.value >= self.target

    def __str__(self) -> str:
        text = f"{self.value:.3f}x" if self.met else f"**{self.value:.3f}x**"
        return text if self.low == self.high else f"{text} ({self.low:.2f}-{self.high:.2f})"


def cells(rows: Rows) -> dict[str, Cell]:
    """By the name of the cell, in the order in which they were measured."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["name"].partition(": ")[0], {})[row["contender"]] = row
    return dict(found)


def ran(cell: Cell, contender: str) -> bool:
    """Whether it is there and did not fail."""
    return contender in cell and not cell[contender]["error"]


def against_torch(cell: Cell) -> Figure | None:
    """Time of torch's stage over ours, both eager."""
    row = next(iter(cell.values()))
    zero_bubble = row["split"] and row["microbatches"] == 4
    return _times(cell, [TORCH], OURS, 1.05 if zero_bubble else 0.99)


def against_compiled(cell: Cell) -> Figure | None:
    """Time of torch's stage, compiled as it runs, over ours with Inductor."""
    split = next(iter(cell.values()))["split"]
    peer = COMPILED if ran(cell, COMPILED) else UNDONATED
    return _times(cell, [peer], INDUCTOR, 1.3 if split else 1.0)


def against_eager(cell: Cell) -> Figure | None:
    """Time of the fastest that is eager over ours with Inductor."""
    return _times(cell, EAGER, INDUCTOR, 1.0)


def adapter(cell: Cell) -> Figure | None:
    """Time of our stages in torch's runtime over our own engine, both eager."""
    return _times(cell, [OURS], ENGINE, 1.03, most=True)


def memory(cell: Cell) -> Figure | None:
    """Peak of our stages over that of torch's, both eager."""
    row = next(iter(cell.values()))
    if not row["split"] or not ran(cell, TORCH) or not ran(cell, OURS):
        return None
    ratio = cell[OURS]["peak"] / cell[TORCH]["peak"]
    return Figure(_name(cell), ratio, ratio, ratio, 0.8, most=True)


def _times(
    cell: Cell, over: Iterable[str], under: str, target: float, *, most: bool = False
) -> Figure | None:
    """The median ratio of turns of the same round; of several, the one with the least median."""
    over = [name for name in over if ran(cell, name)]
    if not over or not ran(cell, under):
        return None
    fastest = min(over, key=lambda name: statistics.median(cell[name]["rounds"]))
    low, middle, high = quartiles(ratios(cell[fastest]["rounds"], cell[under]["rounds"]))
    return Figure(_name(cell), middle, low, high, target, most)


def _name(cell: Cell) -> str:
    name: str = next(iter(cell.values()))["name"]
    return name.partition(": ")[0]


def verdicts(rows: Rows) -> Iterator[str]:
    """A line for each target."""
    every = cells(rows).values()
    for what, figure in (
        (
            "torch's stage over ours, eager: 0.99x, 1.05x in zero-bubble schedules, M=4",
            against_torch,
        ),
        (
            "torch's stage compiled over ours with Inductor: 1.3x in zero-bubble schedules",
            _compiled,
        ),
        ("the fastest eager one over ours with Inductor: 1.00x", against_eager),
        ("peak of activations, ours over torch's stage in split schedules: at most 0.8x", memory),
        ("our stages in torch's runtime over our own engine: at most 1.03x", adapter),
    ):
        found = [each for each in map(figure, every) if each is not None]
        if found:
            yield f"{what}. {_judged(found)}"
    yield f"No schedule in which ours fails. {_failures(every)}"


def _compiled(cell: Cell) -> Figure | None:
    return against_compiled(cell) if next(iter(cell.values()))["split"] else None


def _judged(found: list[Figure]) -> str:
    worst = (max if found[0].most else min)(found, key=lambda each: each.value)
    span = f"farthest {worst} in {worst.cell}"
    missed = [each for each in found if not each.met]
    if not missed:
        return f"Met in all {len(found)} rows, {span}."
    return (
        f"**Missed** in {len(missed)} of {len(found)} rows, {span}: "
        + ", ".join(f"{each.cell} {each}" for each in missed)
        + "."
    )


def _failures(every: Iterable[Cell]) -> str:
    judged = [cell for cell in every if ran(cell, TORCH)]
    failed = [
        f"{_name(cell)}, {name}"
        for cell in judged
        for name in (OURS, INDUCTOR)
        if name in cell and cell[name]["error"]
    ]
    if failed:
        return f"**Missed**: {'; '.join(failed)}."
    return f"Met in all {len(judged)} rows in which torch's own stage runs."
