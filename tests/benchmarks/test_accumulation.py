"""The ways to add weight gradients on small layers; what is found is not judged here."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accumulation import by_hand, weights
from benchmarks.accumulation.page import PAGE
from benchmarks.accumulation.settings import Settings
from benchmarks.results import Results

SMALLEST = Settings(widths=(16,), rows=(4, 100), counts=(3,), rounds=1, seconds=0.0)


def test_layers_make_a_page(tmp_path: Path) -> None:
    rows = [*weights.measure_layers(SMALLEST)]
    for row in rows:
        assert row["gap"]["exact"] == 0.0
        assert max(row["gap"].values()) < 1e-6
        assert {*row["seconds"], *row["peak"]} == {*weights.WAYS}
    results = Results.read(tmp_path / "results.json")
    results.update("layers", rows, "command", "environment")
    text = PAGE.render(results)
    assert "| 3 x 4 rows, width 16   |" in text


def test_ways_of_a_stage_stand_beside_those_by_hand() -> None:
    rows = [*by_hand.measure(SMALLEST)]
    assert by_hand.render(rows).count("3 x 4 rows, width 16") == 1
    for row in rows:
        assert {*row["seconds"]} == {"exact", "joined", "exact by hand", "joined by hand"}
