"""What ``AUTOSPLIT_CHECK=1`` costs: time and bytes of a microbatch, over those without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from autosplit.runtime.check import CHECK_VARIABLE

from ..results import Rows, table
from .clock import interleave, ratio
from .contenders import ACTIONS, Contender, eager, microbatch
from .meter import levels
from .models import Settings, Subject


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model, with the first number of threads."""
    torch.set_num_threads(settings.threads[0])
    for model in settings.models:
        subject = settings.subject(model)
        contenders = {setting: _contender(subject, setting) for setting in "01"}
        first = {setting: _peak(each, subject) for setting, each in contenders.items()}
        times = interleave(contenders, subject, settings.rounds)
        middle, spread = ratio(times["1"], times["0"])
        found = {setting: levels(each, subject) for setting, each in contenders.items()}
        held = {setting: each["I"].held for setting, each in found.items()}
        yield {
            "name": model,
            "time": middle,
            "spread": spread,
            "held_kib": (held["1"] - held["0"]) / 2**10,
            "held": held["1"] / held["0"],
            "first_peak": first["1"] / first["0"],
        }


def _contender(subject: Subject, setting: str) -> Contender:
    with patch.dict(os.environ, {CHECK_VARIABLE: setting}):
        return eager(subject)["autosplit"]()


def _peak(contender: Contender, subject: Subject) -> int:
    """The most that is alive in the first microbatch."""
    found = levels(contender, subject)
    microbatch(contender, subject)  # fills caches
    contender.clear()
    return max(found[action].peak for action in ACTIONS)


def render(rows: Rows) -> str:
    headers = ["", "time", "spread", "held I to W", "more, KiB", "peak of the first microbatch"]
    cells = [
        [
            row["name"],
            f"{row['time']:.3f}x",
            f"{row['spread']:.3f}",
            f"{row['held']:.3f}x",
            f"{row['held_kib']:.0f}",
            f"{row['first_peak']:.1f}x",
        ]
        for row in rows
    ]
    return table(headers, cells)
