"""Every page is what its results render to: figures of a README are written by its benchmark."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.page import HERE
from benchmarks.results import Results


@pytest.mark.parametrize("name", sorted(path.parent.name for path in HERE.glob("*/results.json")))
def test_a_page_is_what_its_results_say(name: str) -> None:
    """And what else is made of them: the table of README, and what was tried."""
    results = Results.read(HERE / name / "results.json")
    page = importlib.import_module(f"benchmarks.{name}.page").PAGE
    assert (HERE / name / "README.md").read_text() == page.render(results)
    for path, render in page.also.items():
        assert path.read_text() == render(results, path.read_text())
