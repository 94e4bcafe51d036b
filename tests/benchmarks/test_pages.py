"""Every page is what its results render to: figures of a README are written by its benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks
from benchmarks.coverage.judge import FACTOR, ROUNDINGS
from benchmarks.coverage.render import render as coverage
from benchmarks.coverage.tried import render as tried
from benchmarks.faults.page import render as faults
from benchmarks.overview import README, written
from benchmarks.paper.overview import overview
from benchmarks.paper.tables import TABLES, page
from benchmarks.results import Results

HERE = Path(benchmarks.__file__).parent
PAGES = {
    "coverage": lambda results: coverage(results, FACTOR, ROUNDINGS),
    "faults": faults,
    "paper": overview,
}
"""Those that are no ``Page``."""


@pytest.mark.parametrize("name", sorted(path.parent.name for path in HERE.glob("*/results.json")))
def test_a_page_is_what_its_results_say(name: str) -> None:
    results = Results.read(HERE / name / "results.json")
    render = PAGES.get(name) or importlib.import_module(f"benchmarks.{name}.page").PAGE.render
    assert (HERE / name / "README.md").read_text() == render(results)


def test_the_table_of_readme_is_what_the_results_say() -> None:
    text = README.read_text()
    assert text == written(text, Results.read(HERE / "pipeline" / "results.json"))


def test_what_was_tried_is_what_the_results_say() -> None:
    results = Results.read(HERE / "coverage" / "results.json")
    assert (HERE.parent / "docs" / "tried.md").read_text() == tried(results)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_paper_is_what_its_results_say(name: str) -> None:
    found = page(name, Results.read(HERE / "paper" / "results.json"), "", "")
    text, again = ((each.partition("## To reproduce")[0]) for each in (found, _read(name)))
    assert text == again


def _read(name: str) -> str:
    return (HERE / "paper" / name / "README.md").read_text()
