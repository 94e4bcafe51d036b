"""First steps of one model at one depth, in turns, each with empty caches."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from ..page import option
from ..results import Rows, Target, table, verdicts
from .fresh_process import measured
from .models import MODELS

RATIO = Target("over torch.compile", at_most=0.25, style=".2f")
GROWTH = Target("s a layer", at_most=0.03, style=".3f")

FIRST_STEP = "benchmarks.startup.first_step"
DEPTH = 32  # the depth of the first target
WHOSE = ("ours", "theirs", "regional")
ENDS = (8, 80)  # the depths between which growth is counted


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    models: tuple[str, ...] = option((*MODELS,), "families", MODELS)
    layers: tuple[int, ...] = option((0,), "2 8 32 80, with Inductor 2 8, of lengths 2 8 32")
    turns: int = option(3, "processes of each kind; medians count")

    def depths(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Those that were asked for."""
        return default if self.layers == (0,) else self.layers


def measure(
    settings: Settings, ours: str, theirs: str, depths: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """A row for each model and depth: ours, the whole compiled, and each block compiled."""
    ways = {"ours": ours, "theirs": theirs, "regional": f"regional {theirs}"}
    for model in settings.models:
        for layers in settings.depths(depths):
            found: dict[str, list[Any]] = {whose: [] for whose in ways}
            for _ in range(settings.turns):
                for whose, way in ways.items():
                    with tempfile.TemporaryDirectory() as cache:
                        found[whose].append(measured(FIRST_STEP, model, layers, way, cache))
            yield {"name": f"{model} {layers}", "model": model, "layers": layers, **found}


def render(rows: Rows) -> str:
    """Seconds of the first step, and how they grow with depth."""
    headers = ["model", "layers", "torch.compile s", "blocks s", "autosplit s", RATIO.name]
    headers += ["over blocks", "later step ms", "torch.compile's", "held KiB"]
    cells = []
    for row in rows:
        cold, whole, blocks = (_median(row[each], "first") for each in WHOSE)
        ratio = cold / whole
        cells.append(
            [
                row["model"],
                str(row["layers"]),
                *(f"{each:.1f}" for each in (whole, blocks, cold)),
                RATIO.cell(ratio) if row["layers"] == DEPTH else f"{ratio:.2f}",
                f"{cold / blocks:.2f}",
                f"{1e3 * _median(row['ours'], 'later'):.1f}",
                f"{1e3 * _median(row['theirs'], 'later'):.1f}",
                f"{row['ours'][-1]['held'] / 1024:.0f}",
            ]
        )
    return f"{table(headers, cells)}\n\n{_judged(rows)}"


def _judged(rows: Rows) -> str:
    deep = [row for row in rows if row["layers"] == DEPTH]
    ratio = {
        row["model"]: _median(row["ours"], "first") / _median(row["theirs"], "first")
        for row in deep
    }
    figures = [(RATIO, ratio), (GROWTH, _growth(rows))]
    lines = [f"Of {DEPTH} layers, and from {ENDS[0]} to {ENDS[1]} layers:"]
    return "\n".join([*lines, verdicts([(target, each) for target, each in figures if each])])


def _growth(rows: Rows) -> dict[str, float]:
    known = {(row["model"], row["layers"]): row for row in rows}
    few, many = ENDS
    return {
        model: (
            _median(known[model, many]["ours"], "first")
            - _median(known[model, few]["ours"], "first")
        )
        / (many - few)
        for model in dict.fromkeys(row["model"] for row in rows)
        if (model, few) in known and (model, many) in known
    }


def _median(found: list[dict[str, Any]], what: str) -> float:
    return float(statistics.median(each[what] for each in found))
