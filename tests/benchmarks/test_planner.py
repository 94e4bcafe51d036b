"""The planner benchmark's harness on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner import big
from benchmarks.planner.automatic import Amount, measure
from benchmarks.planner.page import PAGE
from benchmarks.results import Results

pytestmark = pytest.mark.usefixtures("launched_on_ranks")


def test_a_model_is_cut_both_ways_and_measured(tmp_path: Path) -> None:
    amount = Amount(steps=2, seconds=0.2, training=0.0, tiny=True)
    (row,) = measure(amount, ["convolutional pyramid"])
    result = row["automatic"]
    assert len(result["cuts"]) == 1
    assert len(result["seconds"]) == 5  # the least steps
    assert ("by hand" in row) is (row["alternating"] is not None)
    assert row["blocks"] == row["kinds"] == 3
    results = Results.read(tmp_path / "results.json")
    results.update("automatic", [row], "the command", "the environment")
    text = PAGE.render(results)
    assert "convolutional pyramid" in text
    assert "the command" in text


def test_a_model_is_planned_from_its_shapes() -> None:
    row = {"name": "h100", **big.plan("h100", tiny=True)}
    assert row["plans"][0]["stages"] == 4
    assert len(row["plans"][0]["cuts"]) == 3
    assert row["parameters"] > 10_000
    assert "**" not in big.render([{**row, "peak": 2**30}])
    assert "**5.00**" in big.render([{**row, "peak": 5 * 2**30}])
