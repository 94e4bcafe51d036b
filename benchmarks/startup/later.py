"""Steps after the first with Inductor, ours and ``torch.compile``'s in turns in one process."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..page import KEEPING
from ..results import Rows, Target, table, verdicts
from .first_step import WAYS, run_step
from .measure import Settings
from .models import MODELS, WIDTH
from .process import in_process

DEPTH, WIDE = 12, 512
TARGETS = {
    WIDTH: Target(f"{WIDTH} wide", at_most=1.05, style=".2f"),
    WIDE: Target(f"{WIDE} wide", at_most=1.01, style=".2f"),
}
_WAYS = {"ours": "autosplit inductor", "theirs": "inductor"}
_WARM_UP, _SECONDS = 3, 10.0


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model and width."""
    for model in settings.models:
        for layers in settings.depths((DEPTH,)):
            for width in TARGETS:
                with tempfile.TemporaryDirectory() as cache:
                    arguments = model, layers, width, _SECONDS
                    turns = [
                        in_process(later_steps, *arguments, cache=cache, variables=KEEPING)
                        for _ in range(settings.turns)
                    ]
                name = f"{model} {layers} {width}"
                yield {"name": name, "model": model, "layers": layers, "width": width, "ms": turns}


def later_steps(name: str, layers: int, width: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a step, each way.

    Args:
        name: of ``MODELS``.
        layers: its depth.
        width: its width.
        seconds: how long steps are timed.
    """
    faces = {}
    for whose, way in _WAYS.items():
        torch.manual_seed(0)
        model, batch = MODELS[name](layers, width)
        faces[whose] = WAYS[way](model)
        for _ in range(_WARM_UP):
            run_step(faces[whose], batch)
    times: dict[str, list[float]] = {whose: [] for whose in faces}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for whose, face in faces.items():
            start = time.perf_counter()
            run_step(face, batch)
            times[whose].append(1e3 * (time.perf_counter() - start))
    return {whose: statistics.median(each) for whose, each in times.items()}


def render(rows: Rows) -> str:
    """Milliseconds, and ours over theirs."""
    headers = ["model", "layers", "width", "autosplit ms", "torch.compile ms", "ratio"]
    cells = [
        [
            row["model"],
            str(row["layers"]),
            str(row["width"]),
            *(f"{statistics.median(turn[whose] for turn in row['ms']):.2f}" for whose in _WAYS),
            TARGETS[row["width"]].cell(_ratio(row)),
        ]
        for row in rows
    ]
    figures = [
        (target, {row["model"]: _ratio(row) for row in rows if row["width"] == width})
        for width, target in TARGETS.items()
    ]
    judged = verdicts([(target, found) for target, found in figures if found])
    return f"{table(headers, cells)}\n\n{judged}"


def _ratio(row: dict[str, Any]) -> float:
    return float(statistics.median(turn["ours"] / turn["theirs"] for turn in row["ms"]))
