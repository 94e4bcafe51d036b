"""The first step of a second process, which finds what torch cached in the first."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from ..results import Rows, Target, table, verdicts
from .first_step import first_step
from .measure import Settings
from .process import in_process

DEPTH = 12
TARGET = Target("over the first process", at_most=0.35, style=".2f")
WHOSE = ("ours", "theirs")
_WAYS = {"Inductor": ("autosplit inductor", "inductor"), "eager": ("autosplit", "aot_eager")}


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model, depth and kind of kernels: seconds of both processes, each way."""
    for model in settings.models:
        for layers in settings.depths((DEPTH,)):
            for kernels, ways in _WAYS.items():
                seconds: dict[str, list[list[float]]] = {whose: [] for whose in WHOSE}
                for _ in range(settings.turns):
                    for whose, way in zip(WHOSE, ways, strict=True):
                        seconds[whose].append(_two_processes(model, layers, way))
                name = f"{model} {layers} {kernels}"
                row = {"name": name, "model": model, "layers": layers, "kernels": kernels}
                yield {**row, **seconds}


def _two_processes(model: str, layers: int, way: str) -> list[float]:
    """Seconds to the first step, in a process with empty caches and in the next one."""
    arguments = model, layers, way
    with tempfile.TemporaryDirectory() as cache:
        return [in_process(first_step, *arguments, cache=cache)["first"] for _ in range(2)]


def render(rows: Rows) -> str:
    """Seconds, and the second process over the first."""
    headers = ["model", "kernels", "layers", "autosplit s", "second process s", "ratio"]
    headers += ["torch.compile s", "second process s", "ratio"]
    cells = []
    for row in rows:
        ours, theirs = (_medians(row[whose]) for whose in WHOSE)
        cells.append(
            [
                row["model"],
                row["kernels"],
                str(row["layers"]),
                *(f"{seconds:.1f}" for seconds in ours),
                TARGET.cell(_ratio(ours)),
                *(f"{seconds:.1f}" for seconds in theirs),
                f"{_ratio(theirs):.2f}",
            ]
        )
    figures = {f"{row['model']}, {row['kernels']}": _ratio(_medians(row["ours"])) for row in rows}
    return f"{table(headers, cells)}\n\n{verdicts([(TARGET, figures)])}"


def _medians(turns: list[list[float]]) -> list[float]:
    """Of the first process and of the second."""
    return [statistics.median(seconds) for seconds in zip(*turns, strict=True)]


def _ratio(seconds: list[float]) -> float:
    first, second = seconds
    return second / first
