"""First steps of one model at one depth: each way cold, and again out of its cache, in turns."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from ..results import Rows, table
from ..split.targets import Target, verdicts
from .fresh_process import measured

RATIO = Target("cold / theirs", at_most=0.35, style=".2f")
WARM = Target("warm s", at_most=1.5, style=".1f")
GROWTH = Target("s a layer", at_most=0.05, style=".3f")

FIRST_STEP = "benchmarks.startup.first_step"
DEPTH = 32  # the depth of the first two targets
ENDS = (8, 80)  # the depths between which growth is counted


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        models: of ``MODELS``.
        layers: depths.
        turns: processes of each kind; medians count.
    """

    models: tuple[str, ...]
    layers: tuple[int, ...]
    turns: int


def measure(settings: Settings, ours: str, theirs: str) -> Iterator[dict[str, Any]]:
    """A row for each model and depth, for two ways of ``WAYS``."""
    for model in settings.models:
        for layers in settings.layers:
            found: dict[str, dict[str, list[Any]]] = {}
            for _ in range(settings.turns):
                for way in (theirs, ours):
                    with tempfile.TemporaryDirectory() as cache:
                        for state in ("cold", "warm"):
                            took = measured(FIRST_STEP, model, layers, way, cache)
                            found.setdefault(way, {}).setdefault(state, []).append(took)
            row = {"name": f"{model} {layers}", "model": model, "layers": layers}
            yield {**row, "ours": found[ours], "theirs": found[theirs]}


def render(rows: Rows) -> str:
    """Seconds of the first step, and how they grow with depth."""
    headers = ["model", "layers", "torch.compile s", "warm", "autosplit s", "warm"]
    headers += [RATIO.name, "kept graphs", "later step ms", "torch.compile's", "held KiB"]
    cells = []
    for row in rows:
        ours, theirs = row["ours"], row["theirs"]
        cold, warm = (_median(ours[state], "first") for state in ("cold", "warm"))
        ratio = cold / _median(theirs["cold"], "first")
        cells.append(
            [
                row["model"],
                str(row["layers"]),
                *(f"{_median(theirs[state], 'first'):.1f}" for state in ("cold", "warm")),
                f"{cold:.1f}",
                WARM.cell(warm) if row["layers"] == DEPTH else f"{warm:.1f}",
                RATIO.cell(ratio) if row["layers"] == DEPTH else f"{ratio:.2f}",
                ours["warm"][-1]["cache"],
                f"{1e3 * _median(ours['warm'], 'later'):.1f}",
                f"{1e3 * _median(theirs['warm'], 'later'):.1f}",
                f"{ours['warm'][-1]['held'] / 1024:.0f}",
            ]
        )
    return f"{table(headers, cells)}\n\n{_judged(rows)}"


def _judged(rows: Rows) -> str:
    deep = [row for row in rows if row["layers"] == DEPTH]
    cold = {row["model"]: _cold(row, "ours") / _cold(row, "theirs") for row in deep}
    warm = {row["model"]: _median(row["ours"]["warm"], "first") for row in deep}
    growth = _growth(rows)
    figures = [(RATIO, cold), (WARM, warm), (GROWTH, growth)]
    lines = [f"Of {DEPTH} layers, and from {ENDS[0]} to {ENDS[1]} layers, cold:"]
    return "\n".join([*lines, verdicts([(target, each) for target, each in figures if each])])


def _growth(rows: Rows) -> dict[str, float]:
    known = {(row["model"], row["layers"]): row for row in rows}
    few, many = ENDS
    return {
        model: (_cold(known[model, many], "ours") - _cold(known[model, few], "ours")) / (many - few)
        for model in dict.fromkeys(row["model"] for row in rows)
        if (model, few) in known and (model, many) in known
    }


def _cold(row: dict[str, Any], whose: str) -> float:
    return _median(row[whose]["cold"], "first")


def _median(found: list[dict[str, Any]], what: str) -> float:
    return float(statistics.median(each[what] for each in found))
