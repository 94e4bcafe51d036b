"""A quick slice of the sweep of ``benchmarks/coverage``: one case of each kind."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from autosplit.runtime.check import CHECK_VARIABLE
from autosplit.torch_internals import TORCH
from benchmarks.coverage import pieces
from benchmarks.coverage.examine import Verdict, examine
from benchmarks.coverage.generated.plan import Plan
from benchmarks.coverage.generated.strategies import plans
from benchmarks.coverage.rows import tally
from benchmarks.coverage.subject import Subject

GOOD = {Verdict.EQUAL, Verdict.CLOSE}
ENTRIES = ["nn.BatchNorm2d"]


@functools.cache
def modules() -> dict[str, list[Subject]]:
    """The cases of each entry of the database, which all have to be made to be named."""
    from benchmarks.coverage.module_database import subjects

    results: dict[str, list[Subject]] = {}
    for subject in subjects(1):
        results.setdefault(subject.name.split()[0], []).append(subject)
    return results


@functools.cache
def operators() -> dict[str, Iterator[Subject]]:
    """The cases of each entry, which are made as they are asked for: once."""
    from benchmarks.coverage.operator_database import entries

    return dict(entries(3))


@pytest.mark.parametrize("name", ENTRIES)
def test_module_database(name: str) -> None:
    pytest.importorskip("expecttest", reason="torch's module database imports it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = {case.name: examine(case) for case in modules()[name]}
    assert len(results) == 4  # float32 and float64, train and eval
    assert {key: item.detail for key, item in results.items() if item.verdict not in GOOD} == {}


PIECES = ["mask of documents", "packed, plain object", "batch, dataclass"]
PIECES += ["losses in one list", "scales on modules"]
PIECES += [
    "grouped products, bfloat16",
    "prepare_qat",
    "int8 base",
    "NF4 base",
    "int8 products",
    "autograd in a backward",
]
IN_PARTS = ["losses in one list"]
IN_PARTS += ["mask of documents", "autograd in a backward"] if TORCH < (2, 12) else []


@pytest.mark.parametrize("name", PIECES)
def test_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    (subject,) = (subject for subject in pieces.subjects() if subject.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finding = examine(subject)
    assert (finding.verdict, finding.in_parts) == (Verdict.EQUAL, name in IN_PARTS), finding
    assert finding.share == 1 or finding.in_parts


@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(plans(longest=5))
def test_generated_modules(plan: Plan) -> None:
    with patch.dict(os.environ, {CHECK_VARIABLE: "1"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finding = examine(plan.subject())
    assert finding.verdict not in {Verdict.WRONG, Verdict.CRASHED}, f"{finding.detail}\n{plan}"


OPERATORS = ["linalg.det", "custom NumpySortCustomOp"]
OPERATORS += ["function NumpyCubeNotComposableAutogradFunction"]


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_database(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("expecttest", reason="torch's operator database imports it")
    # Reads the sources of all callers, once an input, to find a unittest.
    monkeypatch.setattr("torch.testing._internal.common_utils.extract_test_fn", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = tally(name, map(examine, operators()[name]))
    assert result["failures"] == {}
    assert not result["refusals"]
    assert {*result["verdicts"]} <= {verdict.value for verdict in GOOD}
