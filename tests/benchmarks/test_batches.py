"""Ways to run lists of a few microbatches; what is found is not judged here."""

from __future__ import annotations

from pathlib import Path

from benchmarks.batches import engine, simulated
from benchmarks.batches.page import PAGE
from benchmarks.batches.settings import Settings
from benchmarks.results import Results

SMALLEST = Settings((2,), (4,), draws=2, steps=3, engine_counts=(3,), unit=0.002, rounds=1)


def test_parts_make_a_page(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "results.json")
    rows = [*simulated.measure(SMALLEST)]
    assert all(step > 0.999 for row in rows for step in row["steps"]["found"])
    results.update("simulated", rows, "command", "environment")
    limits = [*simulated.measure_limits(SMALLEST)]
    assert limits == [{"name": "2 ranks", "kept": [True] * 3}]
    results.update("limits", limits, "command", "environment")
    results.update("planning", [*simulated.measure_planning(SMALLEST)], "command", "environment")
    steps = [*engine.measure(SMALLEST)]
    for row in steps:
        assert row["measured"][0] > 0.95 * row["simulated"]
    results.update("engine", steps, "command", "environment")
    text = PAGE.render(results)
    assert "| 2 ranks, 4 microbatches |" in text
    assert "| 2 ranks | 3       | 100%         |" in text
