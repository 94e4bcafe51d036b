"""Bytes held after F and between I and W, and the most inside each, over what autograd saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..results import Rows, Target, table, verdicts
from .contenders import ACTIONS, Contender, eager, microbatch
from .meter import levels
from .models import Settings, Subject
from .reference import autograd_saves, floor

SAVED = {
    "llama": Target("saved after F", at_most=0.85, style=".2f"),
    "mamba": Target("saved after F", at_most=0.85, style=".2f"),
    "bert": Target("saved after F", at_most=0.8, style=".2f"),
    "resnet": Target("saved after F", at_most=1.0, style=".2f"),
}
FLOOR = Target("held at balanced / floor", at_most=1.03, style=".2f")
TORCH = Target("held at balanced / torch split's", at_most=0.65, style=".2f")
LEAN = Target("held at lean", at_most=0.60, style=".2f")

MEMORY = ("fast", "balanced", "lean")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model and way to run it."""
    for model in settings.models:
        subject = settings.subject(model)
        base = {"model": model, "saves": autograd_saves(subject), "floor": floor(subject)}
        for name, contender in _contenders(subject):
            microbatch(contender, subject)
            contender.clear()
            found = levels(contender, subject)
            yield {
                "name": f"{model}, {name}",
                **base,
                "way": name,
                "held": {action: found[action].held for action in ("F", "I")},
                "peak": {action: found[action].peak for action in ACTIONS},
            }


def _contenders(subject: Subject) -> Iterator[tuple[str, Contender]]:
    """One at a time: another one's caches are not its memory."""
    for memory in MEMORY:
        yield f"autosplit {memory}", eager(subject, memory)["autosplit"]()
    for name, make in eager(subject).items():
        if name != "autosplit":
            yield name, make()


def render(rows: Rows) -> str:
    headers = [
        "",
        "",
        "autograd saves MiB",
        "floor",
        "saved after F",
        "held I to W",
        "/ floor",
        *(f"peak in {action}" for action in ACTIONS),
    ]
    cells = [_cells(row) for row in rows]
    return f"{table(headers, cells)}\n\n{_verdicts(rows)}"


def _cells(row: dict[str, Any]) -> list[str]:
    saves = row["saves"]
    split = row["way"] != "autograd"
    return [
        row["model"],
        row["way"],
        f"{saves / 2**20:.1f}",
        f"{row['floor'] / saves:.2f}",
        f"{row['held']['F'] / saves:.2f}",
        f"{row['held']['I'] / saves:.2f}" if split else "",
        f"{row['held']['I'] / row['floor']:.2f}" if split else "",
        *(f"{peak / saves:.2f}" for peak in row["peak"].values()),
    ]


def _verdicts(rows: Rows) -> str:
    held = {
        way: {row["model"]: row["held"] for row in rows if row["way"] == way}
        for way in ("autosplit balanced", "autosplit lean", "torch split")
    }
    saves = {row["model"]: row["saves"] for row in rows}
    floors = {row["model"]: row["floor"] for row in rows}
    torch_split = {model: each["I"] for model, each in held["torch split"].items()}
    balanced = held["autosplit balanced"]
    waiting = {model: each["I"] for model, each in balanced.items()}
    lean = {model: each["I"] for model, each in held["autosplit lean"].items()}
    saved: dict[Target, dict[str, float]] = {}
    for model, each in balanced.items():
        saved.setdefault(SAVED[model], {})[model] = each["F"] / saves[model]
    return verdicts(
        [
            *saved.items(),
            (FLOOR, _over(waiting, floors)),
            (TORCH, _over(waiting, torch_split)),
            (LEAN, _over(lean, saves)),
        ]
    )


def _over(bytes_held: Mapping[str, int], other: Mapping[str, int]) -> dict[str, float]:
    return {model: held / other[model] for model, held in bytes_held.items() if model in other}
