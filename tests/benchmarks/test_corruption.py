"""Some of the faults that ``benchmarks.corruption`` tries are found, and named right."""

from __future__ import annotations

import pytest

from benchmarks.corruption.faults import KINDS, Fault, faults
from benchmarks.corruption.judge import clean, judge
from benchmarks.corruption.page import render
from tests.kept_ranks import Ranks


@pytest.mark.parametrize("kind", ["NaN", "saved", "message"])
def test_a_fault_is_found_and_named_right(on_ranks: Ranks, kind: str) -> None:
    row = judge(on_ranks, Fault(kind, 2, 0))
    assert (row["found"], row["named"]) == (True, True), row["text"]
    assert row["steps"] <= row["period"]
    assert "**1 of 1 faults** were found, and 1 named right" in render([row])


def test_clean_steps_raise_no_alarm(on_ranks: Ranks) -> None:
    row = clean(on_ranks, 2, 12)
    assert (row["steps"], row["alarms"]) == (12, 0)


def test_faults_are_of_all_kinds() -> None:
    tried = [*faults(38)]
    assert {fault.kind for fault in tried} == {*KINDS}
    assert len({fault.seed for fault in tried}) == 38
