"""The memory benchmark's harness on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.memory import budgets
from benchmarks.memory.settings import Settings
from benchmarks.split.models import Subject

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
    kept = {row["budget"]: row["deferred"] for row in rows}
    assert kept["lean"] <= kept["balanced"]
    text = budgets.render(rows)
    assert "| bert" in text
    assert "balanced" in text
