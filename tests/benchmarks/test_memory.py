"""The memory benchmark's harness on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.pipeline import Costs, StageMemory
from benchmarks.memory import budgets, critics, lean, limit, prediction, yardstick
from benchmarks.memory.page import PAGE
from benchmarks.memory.settings import Settings
from benchmarks.results import Results
from benchmarks.split.models import Subject
from tests.benchmarks.smallest import SMALLEST

TINY = Settings("tiny", ("bert",), (2,), 1, 1, (4,))


def feed_forward(family: str, sizes: object) -> Subject:
    """A stage that is traced in a tenth of the time of a family's, and has what to recompute."""
    module = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return Subject(family, module, torch.randn(8, 16), torch.randn(8, 16))


def test_budgets_are_measured_on_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SHARES", (0.8,))
    monkeypatch.setattr(budgets, "middle", feed_forward)
    rows = [*budgets.measure(TINY)]
    names = [row["budget"] for row in rows]
    assert names[:4] == ["autograd", "fast", "balanced", "lean"]
    assert "80%" in names
    held = {row["budget"]: row["deferred"] for row in rows}
    assert held["lean"] <= held["balanced"]
    text = budgets.render(rows)
    assert "| bert" in text
    assert "balanced" in text


@pytest.mark.usefixtures("launched_on_ranks")
def test_predictions_are_held_against_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cases the one that recomputes."""
    monkeypatch.setattr(prediction, "CASES", (prediction.DRAWN,))
    monkeypatch.setattr(prediction, "SIZES", {"tiny": {"bert": SMALLEST.overrides("bert")}})
    rows = [*prediction.measure(TINY)]
    assert len(rows) == len(prediction.CASES)
    assert all(len(row["predicted"]) == len(row["measured"]) == 2 for row in rows)
    assert "met everywhere" in prediction.render(rows)


def test_the_page_judges_what_was_found(tmp_path: Path) -> None:
    base = {"microbatches": 2, "error": "", "rounds": [0.10, 0.12]}
    rows = [
        {**base, "name": "M=2, 1F1B, fused", "schedule": "1F1B", "ours": False, "activations": 100},
        {
            **base,
            "name": "M=2, zb-h1, lean",
            "schedule": "zb-h1, lean",
            "ours": True,
            "activations": 90,
            "rounds": [0.09, 0.11],
        },
        {**base, "name": "M=2, other", "schedule": "other", "ours": True, "error": "ValueError: x"},
    ]
    text = lean.render(rows)
    assert "**0.90**" in text
    assert "missed by M=2, zb-h1, lean (0.90)" in text
    assert "ValueError: x" in text
    results = Results.read(tmp_path / "results.json")
    results.update("lean", rows, "the command", "the environment")
    assert PAGE.parts["lean"].title in PAGE.render(results)
    assert "the command" in PAGE.render(results)


def test_what_balancing_buys_is_projected_from_one_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def layer(attention: str, samples: int, settings: Settings) -> critics.Measured:
        memory = [StageMemory(samples * 8.0, samples * 6.0, 1.0)] * critics.RANKS
        return critics.Measured(Costs([(samples**0.9,) * 3] * critics.RANKS, memory), samples)

    monkeypatch.setattr(critics, "RANKS", 4)
    monkeypatch.setattr(critics, "SAMPLES", 8)
    monkeypatch.setattr(critics, "ATTENTION", ("sdpa",))
    monkeypatch.setattr(critics, "_layer", layer)
    rows = [*critics.measure_all(TINY)]
    assert len(rows) == len(critics.ATTENTION) * len(critics.LINKS) * len(critics.CAPS)
    roomy = [row for row in rows if "cap 1.3" in row["name"]]
    assert all(row["without"] for row in roomy)
    text = critics.render(rows)
    assert "It buys something in" in text
    assert "balanced: " in text


def test_a_limit_is_judged_by_what_was_held_and_a_refusal_is_shown() -> None:
    base = {"plain": [90, 100], "fixed": [20, 20], "limit": 2**20}
    found = {
        "kinds": ["FORWARD", "RECOMPUTE"],
        "measured": [2**20, 2**21],
        "activations": [100, 100],
        "predicted": [100, 110],
        "same": True,
        "seconds": [0.1],
        "simulated": 0.1,
    }
    text = limit.render(
        [
            base | found | {"name": "one"},
            base | {"name": "other", "error": "nothing was found"},
        ]
    )
    assert "missed by one (2.000)" in text
    assert "recompute" in text
    assert "nothing was found" in text
    assert "missed by one (10.0%)" in text


def test_the_search_is_judged_beside_solver_and_single_measures() -> None:
    row: dict[str, Any] = {"stages": 2, "microbatches": 4, "limit": 10.0, "measures": ""}
    row |= {"unlimited": 90.0}
    row |= {"step": 104.0, "single": None, "solution": 100.0, "least": 50.0}
    row |= {"seconds": 60.0}
    text = yardstick.render([row | {"name": "0"}])
    assert "missed by 0 (1.040)" in text
    assert "order only" in text
