"""The memory benchmark's harness on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import budgets, lean, prediction
from benchmarks.memory.page import PARTS, page
from benchmarks.memory.settings import Settings
from benchmarks.results import Results

TINY = Settings("tiny", ("bert",), (2,), 1, 1, (4,))


def test_budgets_are_measured_on_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SHARES", (0.8, 0.1))
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
    """Of the cases the first, which is not split, and the one that recomputes."""
    fused, *_, lean, _ = prediction.CASES
    monkeypatch.setattr(prediction, "CASES", (fused, lean))
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
    assert PARTS["lean"].title in page(results)
    assert "the command" in page(results)
