"""First steps of one model at one depth, in turns, each with empty caches."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from ..page import option
from ..results import Rows, Target, table, verdicts
from .first_step import first_step
from .models import MODELS
from .process import in_process

GROWTH = Target("s a layer", at_most=0.03, style=".3f")

WHOSE = ("ours", "theirs", "regional")
ENDS = (8, 80)  # the depths between which growth is counted


@dataclasses.dataclass(frozen=True)
class Aim:
    """What is asked of models of one depth.

    Attributes:
        depth: layers.
        whole: most of the time that the whole model takes under ``torch.compile``.
        blocks: most of the time that its blocks take, each compiled by itself; None: nothing.
    """

    depth: int
    whole: float
    blocks: float | None = None

    @property
    def targets(self) -> dict[str, Target]:
        """By whose time ours is divided by."""
        found = {"theirs": Target("over torch.compile", at_most=self.whole, style=".2f")}
        if self.blocks is not None:
            found["regional"] = Target("over blocks", at_most=self.blocks, style=".2f")
        return found


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    models: tuple[str, ...] = option((*MODELS,), "families", MODELS)
    layers: tuple[int, ...] = option((0,), "2 8 32 80, with Inductor 4 12, of restarts 8 32")
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
                        arguments = model, layers, way
                        found[whose].append(in_process(first_step, *arguments, cache=cache))
            yield {"name": f"{model} {layers}", "model": model, "layers": layers, **found}


def render(aim: Aim, rows: Rows) -> str:
    """Seconds of the first step, and how they grow with depth."""
    headers = ["model", "layers", "torch.compile s", "blocks s", "autosplit s"]
    headers += ["over torch.compile", "over blocks", "held KiB"]
    cells = []
    for row in rows:
        cold, whole, blocks = (_median(row[each], "first") for each in WHOSE)
        cells.append(
            [
                row["model"],
                str(row["layers"]),
                *(f"{each:.1f}" for each in (whole, blocks, cold)),
                _ratio(aim, row, "theirs"),
                _ratio(aim, row, "regional"),
                f"{row['ours'][-1]['held'] / 1024:.0f}",
            ]
        )
    return f"{table(headers, cells)}\n\n{_judged(aim, rows)}"


def _ratio(aim: Aim, row: dict[str, Any], whose: str) -> str:
    ratio = _over(row, whose)
    target = aim.targets.get(whose) if row["layers"] == aim.depth else None
    return f"{ratio:.2f}" if target is None else target.cell(ratio)


def _over(row: dict[str, Any], whose: str) -> float:
    return _median(row["ours"], "first") / _median(row[whose], "first")


def _judged(aim: Aim, rows: Rows) -> str:
    deep = [row for row in rows if row["layers"] == aim.depth]
    figures = [
        (target, {row["model"]: _over(row, whose) for row in deep})
        for whose, target in aim.targets.items()
    ]
    found = verdicts([(target, each) for target, each in figures if each])
    lines = [f"Of {aim.depth} layers:", found] if deep else []
    if growth := _growth(rows):
        lines += [f"From {ENDS[0]} to {ENDS[1]} layers:", verdicts([(GROWTH, growth)])]
    return "\n".join(lines)


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
