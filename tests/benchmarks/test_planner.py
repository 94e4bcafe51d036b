"""The planner benchmark's harness on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.planner import big, tables
from benchmarks.planner.automatic import Amount, measure
from benchmarks.planner.models import CASES, Pyramid
from benchmarks.planner.page import PAGE
from benchmarks.results import Results

pytestmark = pytest.mark.usefixtures("launched_on_ranks")


def test_a_model_is_cut_both_ways_and_measured(tmp_path: Path) -> None:
    amount = Amount(steps=2, seconds=0.2, rehearsal=0.1, turns=2, turn=0.0, tiny=True)
    (row,) = measure(amount, ["convolutional pyramid"])
    found = row["automatic"]
    assert len(found["cuts"]) == 1
    assert len(found["rehearsed"]) == len(found["seconds"]) == 2 * 5  # turns of the least steps
    assert ("by hand" in row) is (row["alternating"] is not None)
    assert found["times"][0][1] < found["times"][1][1]  # a first stage has no I
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


def _row(**changes: Any) -> dict[str, Any]:
    times = [[1.0, 0.0, 2.0], [1.0, 1.0, 1.0]]
    way = {
        "cuts": ["b"],
        "seconds": [12.0, 12.0, 12.0],
        "rehearsed": [12.0, 12.0, 12.0],
        "rehearsed_times": times,
        "predicted": 12.0,
        "profiled": 12.0,
        "profiled_times": times,
        "times": times,
    }
    common = {"name": "llama", "blocks": 4, "kinds": 3, "even": 1.0, "estimated": ["b"]}
    alternating = dict.fromkeys(tables.WAYS, way["seconds"])
    ways = {"automatic": way, "by hand": {**way, "cuts": ["c"]}, "alternating": alternating}
    return {**common, **ways, **changes}


@pytest.mark.parametrize(
    ("name", "seconds", "missed"),
    [("llama", 12.0, False), ("llama", 11.0, True), ("big embedding and head", 13.0, True)],
)
def test_steps_that_miss_their_target_are_bold(name: str, seconds: float, missed: bool) -> None:
    row = _row(name=name)
    row["alternating"]["by hand"] = [seconds] * 3
    assert ("**" in tables.render_steps([row])) is missed


def test_equal_cuts_are_not_compared() -> None:
    row = _row()
    del row["by hand"]
    assert "same" in tables.render_steps([row])


def test_predictions_and_uneven_stages_that_miss_are_bold() -> None:
    assert "**" not in tables.render_predictions([_row()])
    late = {**_row()["automatic"], "seconds": [13.0] * 3}
    assert "**0.923**" in tables.render_predictions([_row(automatic=late)])
    drifted = {**_row()["automatic"], "predicted": 11.0}
    text = tables.render_predictions([_row(automatic=drifted)])
    assert "0.917" in text  # told, but it says nothing of the rehearsal
    assert "**" not in text
    uneven = {**_row()["automatic"], "times": [[2.0, 0.0, 2.0], [1.0, 1.0, 1.0]]}
    assert "**1.143**" in tables.render_predictions([_row(automatic=uneven)])
    assert "**" not in tables.render_predictions([_row(automatic=uneven, even=1.1)])


def test_the_pyramid_narrows() -> None:
    subject = Pyramid(width=8, image=16, microbatch_size=2)
    model, (x,) = subject.build(), subject.example()
    sizes = []
    for module in model:
        x = module(x)
        sizes.append(x.shape)
    assert sizes[0] == torch.Size([2, 8, 16, 16])
    assert sizes[-2] == torch.Size([2, 28, 2, 2])
    assert sizes[-1] == torch.Size([2, 10])
    assert subject.cut_by_hand(2) == ("4",)
    assert CASES["convolutional pyramid"].lopsided
