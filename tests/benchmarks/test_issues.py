"""A slice of the reproducers of ``benchmarks.issues``, and what they are judged by."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.torch_internals.pipelining_schedules import SUPPORTED
from autosplit.torch_internals.version import TORCH
from benchmarks.issues import gradients
from benchmarks.issues.__main__ import row_of
from benchmarks.issues.case import ABSENT, FAILS, RIGHT, Case, SymptomError
from benchmarks.issues.cases import CASES
from benchmarks.issues.gradients import mean_square
from benchmarks.issues.judge import waited_for
from benchmarks.issues.page import OPEN, render
from benchmarks.issues.rank import first_line
from benchmarks.results import Results
from tests.interpreters import printed_by


@pytest.mark.skipif(TORCH not in SUPPORTED, reason="another torch.distributed.pipelining")
def test_a_report_is_rebuilt_on_stock_torch_and_right_with_autosplit() -> None:
    row = row_of(CASES["gradients-accumulated-over-steps"], timeout=60.0)
    assert row["stock"]["state"] == FAILS, row
    assert "0.625 times plain autograd's" in row["stock"]["text"]
    assert row["ours"]["state"] == RIGHT, row
    assert row["stock"]["claimed"]
    assert row["ours"]["claimed"]


def test_the_ranks_of_stock_torch_know_nothing_of_autosplit() -> None:
    code = "import sys, benchmarks.issues.rank; print(*sys.modules)"
    loaded = printed_by(code).split()
    assert "benchmarks.issues.cases.compiled" in loaded
    assert not [name for name in loaded if name.startswith("autosplit")]


def test_claims_are_of_a_version_and_of_what_was_reported() -> None:
    case = CASES["weight-used-twice-in-a-stage"]
    assert case.fixed is not None
    before = (case.fixed[0], case.fixed[1] - 1)
    wrong = "the gradient of 1.weight is 1.5 times plain autograd's"
    assert case.claims("stock", before).holds(FAILS, wrong)
    assert not case.claims("stock", before).holds(FAILS, "ValueError: something else")
    assert not case.claims("stock", before).holds(RIGHT, "")
    assert case.claims("stock", case.fixed).holds(RIGHT, "")
    assert case.claims("ours", before).holds(RIGHT, "")
    assert not case.claims("ours", before).holds(FAILS, wrong)


def test_wrong_gradients_are_told_by_how_much() -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    batch = torch.randn(2, 4), torch.randn(2, 4)
    right = gradients.plain(stages, [batch], mean_square)
    assert all(parameter.grad is None for stage in stages for parameter in stage.parameters())
    gradients.check(right, right)
    weight = right["0.weight"]
    assert weight is not None
    with pytest.raises(SymptomError, match=r"0\.weight is 3 times plain"):
        gradients.check({"0.weight": 3 * weight}, right)
    with pytest.raises(SymptomError, match=r"0\.weight is off by"):
        gradients.check({"0.weight": weight + torch.eye(4)}, right)
    with pytest.raises(SymptomError, match=r"0\.weight has no gradient"):
        gradients.check({"0.weight": None}, right)
    with pytest.raises(ValueError, match="no gradients were compared"):
        gradients.check({}, right)


def test_an_error_is_called_after_its_first_cause() -> None:
    about = RuntimeError("Failed to run stage backward")
    about.__cause__ = KeyError("6")
    assert first_line(about) == "KeyError: '6'"
    told = RuntimeError("\n  first line\nsecond")
    told.__cause__ = StopIteration()
    assert first_line(told) == "RuntimeError: first line"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("open(FILE, 'w').write(RIGHT)", "fine"),
        ("import os; os.abort()", "rank 0 killed by SIGABRT"),
        ("raise SystemExit('what():  no memory')", "rank 0 ends with 1: what():  no memory"),
        ("import time; time.sleep(60)", "hangs: 1 of 1 ranks wait 1 s"),
    ],
    ids=["right", "dies", "exits", "hangs"],
)
def test_ranks_that_die_or_hang_are_said_to(tmp_path: Path, code: str, text: str) -> None:
    file = tmp_path / "0.json"
    found = '{"state": "right", "text": "fine", "symptom": false, "at": 0}'
    program = f"FILE, RIGHT = {str(file)!r}, {found!r}; {code}"
    state, said = waited_for([[sys.executable, "-c", program]], [{}], [file], timeout=1.0)
    assert said == text
    assert state == (RIGHT if text == "fine" else FAILS)


def test_every_case_has_its_place_on_the_page_and_what_is_open_is_marked() -> None:
    threads = {thread for case in CASES.values() for thread in case.threads}
    assert len(threads) >= 20
    rows = [_row(case) for case in CASES.values()]
    rows[0]["ours"] |= {"state": FAILS, "text": "not | yet"}
    rows[1]["stock"] |= {"claimed": False}
    old = [{**row, "stock": {**row["stock"], "state": RIGHT}} for row in rows[:1]]
    page = render(
        Results(Path(), {"2.13.0": _part(rows), "2.11.0": _part(old)}),
        CASES,
    )
    assert all(thread.link in page for thread in threads)
    assert f"{OPEN}: not \\| yet" in page
    assert page.count(OPEN) == 1
    assert "and 1 open" in page
    assert f"- {rows[1]['name']}, stock: seen" in page
    rows_by_version = page.partition("Stock torch, by version")[2].count("](https://")
    assert rows_by_version == len(CASES[rows[0]["name"]].threads)
    assert f"**{ABSENT}**" in page


def _row(case: Case) -> dict[str, Any]:
    side = {"state": FAILS, "text": "seen", "claimed": True}
    absent = {"state": ABSENT, "text": "no GPU", "claimed": True}
    stock = absent if case.name == "a-step-as-one-cuda-graph" else side
    return {"name": case.name, "stock": {**stock}, "ours": {**side, "state": RIGHT}}


def _part(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"environment": "torch", "commands": ["python -m benchmarks.issues"], "rows": rows}
