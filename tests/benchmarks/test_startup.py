"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Results
from benchmarks.startup.first_step import first_step
from benchmarks.startup.page import PAGE


def test_a_first_step_is_measured() -> None:
    result = first_step("bert", 1, "autosplit")
    assert result["first"] > 0
    assert result["held"] > 0


def test_later_steps_make_a_page(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "results.json")
    for width, ours in (64, 1.1), (512, 1.0):
        row = {"name": f"llama {width}", "model": "llama", "layers": 12, "width": width}
        results.update(
            "later", [{**row, "ms": [{"ours": ours, "theirs": 1.0}]}], "command", "environment"
        )
    page = PAGE.render(results)
    assert "Target 64 wide ≤ 1.05: missed by llama (1.10)." in page
    assert "Target 512 wide ≤ 1.01: met everywhere." in page


def test_second_processes_make_a_page(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "results.json")
    for kernels, seconds in ("Inductor", 3.0), ("eager", 6.0):
        row = {"name": kernels, "model": "bert", "layers": 12, "kernels": kernels}
        times = {"ours": [[10.0, seconds]], "theirs": [[40.0, 4.0]]}
        results.update("second", [{**row, **times}], "command", "environment")
    page = PAGE.render(results)
    assert "Target over the first process ≤ 0.35: missed by bert, eager (0.60)." in page


def test_restarts_make_a_page(tmp_path: Path) -> None:
    starts = {
        "first": [{"seconds": 24.0, "building": 16.0, "whole": 1, "stages": 5, "timed": 1}],
        "again": [{"seconds": 6.0, "building": 2.0, "whole": 1, "stages": 1, "timed": 0}],
    }
    results = Results.read(tmp_path / "results.json")
    row = {"name": "llama 32", "model": "llama", "layers": 32, **starts}
    results.update("restart", [row], "command", "environment")
    assert "Target over the first start ≤ 0.50: met everywhere." in PAGE.render(results)
