"""The paper's tables on the smallest settings; what they find is not judged here."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.paper import __main__ as command
from benchmarks.paper import scaling, theory
from benchmarks.paper.settings import SIZES
from benchmarks.paper.tables import MEASUREMENTS, TABLES, needed, page
from benchmarks.results import Results
from tests.benchmarks.smallest import SMALLEST

pytestmark = pytest.mark.usefixtures("launched_on_ranks")


def test_the_published_speedup_exceeds_its_ideal() -> None:
    assert theory.BY_LABEL["1F1B-1"].ideal_speedup(4) == Fraction(7, 5)
    assert theory.zero_bubble_ceiling(4) == Fraction(7, 4)
    assert "1.70x" in theory.verdict()
    assert "exceeds the ideal" in theory.verdict()


def test_measurements_come_in_an_order_in_which_none_lacks_another() -> None:
    assert needed(["scaling", "throughput"]) == ["stages", "cells", "peers", "scaling"]
    assert needed(TABLES) == [*MEASUREMENTS]
    assert set(SIZES["small"]) == set(SIZES["tiny"])


def test_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["speed"])
    assert "unknown table 'speed'; known tables: throughput, memory" in capsys.readouterr().err


def test_cells_make_their_pages(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "results.json")
    for name in ("stages", "cells", "scaling"):
        rows = [*MEASUREMENTS[name](SMALLEST, results)]
        results.update(name, rows, "command", "environment")
    fused, split = results.rows("cells")
    assert (fused["split"], split["split"]) == (False, True)
    assert max(split["max_grad_diff"], fused["max_grad_diff"]) < 1e-5
    command.main(["throughput", "--pages", "--output", str(tmp_path)])
    text = (tmp_path / "throughput" / "README.md").read_text()
    assert f"{split['speedup']:.3f}x" in text
    assert "of 1 cells" in text
    for name, words in {
        "memory": "Geometric mean",
        "bubble": "| 2   | 1F1B-1     | split",
        "occupancy": "bert",
        "scaling": "F = I = W",
    }.items():
        assert words in page(name, results, "command", "environment"), name
    for row in results.rows("scaling"):
        assert row["measured"] >= 0.99 * row["simulated"]
        assert 0.0 < scaling.bubble_of(row) < 1.0
