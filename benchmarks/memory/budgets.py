"""Checkpointing of intermediate derivatives: memory against time over budgets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autosplit.errors import SplitError

from ..paper import settings as paper
from ..paper.stages import middle
from ..results import Rows, table
from ..split.clock import interleave, ratio
from ..split.contenders import Contender, eager, microbatch
from ..split.meter import levels
from ..split.models import Subject
from ..split.reference import autograd_saves
from .settings import Settings

NAMED = ("fast", "balanced", "lean")
SHARES = (0.8, 0.6, 0.4, 0.2)
"""Budgets, of what ``"balanced"`` holds between I and W."""


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and budget, one thread."""
    torch.set_num_threads(1)
    sizes = paper.Settings(settings.size, settings.families, (), 1, 1, 1, (), 1.0, 2.0)
    for family in settings.families:
        subject = middle(family, sizes)
        contenders = _contenders(subject)
        found = interleave(contenders, subject, settings.rounds)
        saves = autograd_saves(subject)
        for name, contender in contenders.items():
            held = {} if name == "autograd" else levels(contender, subject)
            step, spread = ratio(found[name], found["balanced"])
            yield {
                "name": f"{family}, {name}",
                "family": family,
                "budget": name,
                "saved": held["F"].held / saves if held else 1.0,
                "deferred": held["I"].held / saves if held else 0.0,
                "peak": max(each.peak for each in held.values()) / saves if held else 0.0,
                "ms": found[name].medians(),
                "ratio": step,
                "spread": spread,
            }


def _contenders(subject: Subject) -> dict[str, Contender]:
    """Autograd, the settings by name, and those budgets that can be met."""
    found = {"autograd": eager(subject)["autograd"]()}
    for name in NAMED:
        found[name] = eager(subject, name)["autosplit"]()
    microbatch(found["balanced"], subject)
    found["balanced"].clear()
    held = levels(found["balanced"], subject)["I"].held
    for share in SHARES:
        with contextlib.suppress(SplitError):  # below the least there is
            found[f"{share:.0%}"] = eager(subject, round(share * held))["autosplit"]()
    for contender in found.values():
        microbatch(contender, subject)
        contender.clear()
    return found


def render(rows: Rows) -> str:
    """A row a budget, of what autograd saves."""
    cells = []
    for row in rows:
        own = row["budget"] != "autograd"
        cells.append(
            [
                row["family"],
                row["budget"],
                f"{row['saved']:.2f}",
                f"{row['deferred']:.2f}" if own else "",
                f"{row['peak']:.2f}" if own else "",
                *(f"{each:.1f}" for each in row["ms"].values()),
                f"{row['ratio']:.3f} ({row['spread']:.3f})",
            ]
        )
    headers = ["family", "budget", "after F", "I to W", "peak", "F ms", "I", "W"]
    return table([*headers, "F+I+W / balanced (spread)"], cells)
