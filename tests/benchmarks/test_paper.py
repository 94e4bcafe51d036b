"""The paper's tables on the smallest settings; what they find is not judged here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import pytest

from autosplit.compare import run as comparison
from benchmarks.paper import cells, scaling, stages, theory
from benchmarks.paper.page import PAGE
from benchmarks.paper.settings import Settings
from benchmarks.results import Results
from examples.families import automatic
from examples.models import MlpConfig


class Smallest(Settings):
    """The smallest model that has a middle one of three stages: of three layers."""

    def overrides(self, family: str) -> Mapping[str, object]:
        return {**super().overrides(family), "layers": 3}


# bert is traced in half the time of the others.
SMALLEST = Smallest("tiny", ("bert",), ("1F1B-1",), 2, 1, 1, (2,), 0.004, 0.2)

PERCEPTRON = MlpConfig(features=8, width=8, layers=3, microbatch_size=4)


def compare_perceptrons(settings: comparison.Settings) -> list[comparison.ComparisonRow] | None:
    """Compare a model that is traced in a tenth of the time of a family's."""
    overrides = dataclasses.asdict(PERCEPTRON)
    factory = "examples.models:mlp"
    return comparison.compare(dataclasses.replace(settings, factory=factory, overrides=overrides))


pytestmark = pytest.mark.usefixtures("launched_on_ranks")


def test_the_published_speedup_exceeds_its_ideal() -> None:
    assert theory.BY_LABEL["1F1B-1"].ideal_speedup(4) == Fraction(7, 5)
    assert theory.zero_bubble_ceiling(4) == Fraction(7, 4)
    assert "1.70x" in theory.verdict()
    assert "exceeds the ideal" in theory.verdict()


def test_a_family_is_a_factory_with_its_loss() -> None:
    model, batch = automatic.bert(**SMALLEST.overrides("bert"))
    assert math.isfinite(model(*batch).item())


def test_parts_make_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = stages.middle("bert", SMALLEST)  # which takes a plan of the model
    monkeypatch.setattr(stages, "middle", lambda family, settings: subject)
    monkeypatch.setattr(cells, "compare", compare_perceptrons)
    results = Results.read(tmp_path / "results.json")
    parts = {"cells": cells, "stages": stages}
    result = {name: part.measure(SMALLEST) for name, part in parts.items()}
    for name, rows in result.items():
        results.update(name, [*rows], "command", "environment")
    rows = [*scaling.measure(SMALLEST, results.rows("stages"))]
    results.update("scaling", rows, "command", "environment")
    fused, split = results.rows("cells")
    assert (fused["split"], split["split"]) == (False, True)
    assert max(split["max_grad_diff"], fused["max_grad_diff"]) < 1e-5
    text = PAGE.render(results)
    for words in (f"{split['speedup']:.3f}x", "of 1 cells", "| 2   | 1F1B-1     | split"):
        assert words in text
    for row in results.rows("scaling"):
        assert row["measured"] >= 0.99 * row["simulated"]
        assert 0.0 < scaling.bubble_of(row) < 1.0
