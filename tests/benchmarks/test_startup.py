"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Results
from benchmarks.startup.first_step import first_step
from benchmarks.startup.page import PAGE


def test_a_first_step_is_measured() -> None:
    result = first_step("bert", 2, "autosplit")
    assert result["first"] > result["later"] > 0
    assert result["held"] > 0


def test_restarts_make_a_page(tmp_path: Path) -> None:
    starts = {
        "first": [{"seconds": 24.0, "building": 16.0, "whole": 1, "stages": 5, "timed": 1}],
        "again": [{"seconds": 6.0, "building": 2.0, "whole": 1, "stages": 1, "timed": 0}],
    }
    results = Results.read(tmp_path / "results.json")
    row = {"name": "llama 32", "model": "llama", "layers": 32, **starts}
    results.update("restart", [row], "command", "environment")
    assert "Target over the first start ≤ 0.50: met everywhere." in PAGE.render(results)
