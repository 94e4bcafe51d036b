"""Some of the faults that ``benchmarks.corruption`` tries are found, and named right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autosplit.cli import main
from benchmarks.corruption import replayed, timeline
from benchmarks.corruption.faults import KINDS, Fault, faults
from benchmarks.corruption.judge import clean, judge
from benchmarks.corruption.page import render, render_replay
from benchmarks.corruption.subject import Outcome
from tests.kept_ranks import Ranks


@pytest.mark.parametrize("kind", ["NaN", "saved", "held", "message"])
def test_a_fault_is_found_and_named_right(on_ranks: Ranks, kind: str) -> None:
    row = judge(on_ranks, Fault(kind, 2, 0))
    assert (row["found"], row["named"]) == (True, True), row["text"]
    assert row["steps"] <= row["period"]
    assert "**1 of 1 faults** were found, and 1 named right" in render([row])


def test_a_held_tensor_may_be_found_by_an_audit() -> None:
    """Before the action that takes it, whose digests would show the bit."""
    text = "rank 1: 1F2 had other bits when it ran again, in held sqrt; the first of three runs"
    outcome = Outcome("1F2", 1, 17, text, 1, 126)
    row = judge(lambda *_, **__: [outcome, outcome], Fault("held", 2, 14))
    assert (row["found"], row["named"]) == (True, True)


def test_clean_steps_raise_no_alarm(on_ranks: Ranks) -> None:
    row = clean(on_ranks, 2, 12)
    assert (row["steps"], row["alarms"]) == (12, 0)


def test_faults_are_of_all_kinds() -> None:
    tried = [*faults(38)]
    assert {fault.kind for fault in tried} == {*KINDS}
    assert len({fault.seed for fault in tried}) == 38


@pytest.mark.filterwarnings("ignore:the flight recorder wrote")
def test_actions_of_a_stage_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "ACTIONS", {"F with a NaN in a sample": "1F2"})
    monkeypatch.setattr(replayed, "_TIMES", 1)

    def run(command: list[str], **_: Any) -> None:
        """The command in this process, which has imported torch."""
        assert command[1:4] == ["-m", "autosplit", "replay"]
        assert CliRunner().invoke(main, command[3:]).exit_code == 1

    monkeypatch.setattr(replayed.subprocess, "run", run)
    (row,) = replayed.measure(1, 16)
    assert row["text"].startswith("1F2 on rank 0: NaN in aten.")
    assert "samples   5 of the batch, in microbatch 2" in row["text"]
    assert "F with a NaN in a sample, 16 wide" in render_replay([row])


def test_a_fault_is_framed_where_it_ran_and_where_it_ran_again(tmp_path: Path) -> None:
    rows = [{"ran": [(f"{rank}B2", rank, rank + 1)], "again": []} for rank in range(4)]
    rows[2]["again"] = [("2B2", 3, 4), ("2B1", 4, 5)]
    timeline.draw(rows, tmp_path / "step.svg")
    frame = "stroke: #ff0000; stroke-width: 2.5"
    assert (tmp_path / "step.svg").read_text().count(frame) == 3  # and in the legend
