"""Ways to run lists of a few microbatches; what is found is not judged here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.batches import engine, simulated
from benchmarks.batches.limits import StorageCount
from benchmarks.batches.page import PAGE
from benchmarks.batches.settings import Settings
from benchmarks.results import Results

SMALLEST = Settings(
    (2,), (4,), draws=1, steps=3, engine_counts=(3,), unit=0.002, rounds=1, repeats=1
)


@pytest.mark.usefixtures("launched_on_ranks")
def test_parts_make_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "LIMITS", {"no limit": None, "limit 1x": 1.0})
    results = Results.read(tmp_path / "results.json")
    rows = [*simulated.measure(SMALLEST)]
    assert all(step > 0.999 for row in rows for step in row["steps"]["found"])
    results.update("simulated", rows, "command", "environment")
    kept = {"name": "2 ranks, auto", "steps": [[0.9, 0.95], [], [0.8, 1.01]]}  # one is refused
    results.update("limits", [kept], "command", "environment")
    results.update("planning", [*simulated.measure_planning(SMALLEST)], "command", "environment")
    steps = [*engine.measure(SMALLEST)]
    for row in steps:
        assert row["measured"][0] > 0.95 * row["simulated"]
    results.update("engine", steps, "command", "environment")
    text = PAGE.render(results)
    assert "| 2 ranks, 4 microbatches |" in text
    cells = re.split(r" *\| *", text.partition("2 ranks, auto")[2])
    assert cells[1:5] == ["2", "1", "100%", "**50%**"]


def test_storages_count_as_long_as_they_live() -> None:
    ones = torch.ones(64)
    with StorageCount([ones]) as count:
        view = (ones + 1)[:2]
        assert count.most == 2 * 256
        del view
        assert [part.shape[0] for part in (ones + 1).split(32)] == [32, 32]
        assert count.most == 2 * 256
