"""A slice of the damaged files, and that the judge finds what is wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.torch_csv import read_csv, write_csv
from benchmarks.fuzz import judge as judging
from benchmarks.fuzz.judge import Verdict, check_csv, judge
from benchmarks.fuzz.subjects import SUBJECTS
from benchmarks.fuzz.sweep import sweep


@pytest.mark.parametrize("name", SUBJECTS)
def test_damaged_files_are_read_right_or_refused(name: str) -> None:
    found = sweep(SUBJECTS[name](), 100)
    assert found.failure == ""
    assert found.verdicts[Verdict.READ] > 0
    assert found.verdicts[Verdict.REFUSED] > 0


def test_the_judge_knows_a_wrong_an_untyped_and_a_hanging_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(path: Path) -> Schedule:
        found = read_csv(path)
        return replace(found, ranks=(found.ranks[0][::-1], *found.ranks[1:]))

    def untyped(path: Path) -> Schedule:
        raise IndexError("list index out of range")

    def hanging(path: Path) -> Schedule:
        time.sleep(60)
        return read_csv(path)

    monkeypatch.setattr(judging, "LIMIT", 0.1)
    for reader, verdict in (
        (read_csv, Verdict.READ),
        (other, Verdict.WRONG),
        (untyped, Verdict.UNTYPED),
        (hanging, Verdict.HUNG),
    ):
        write_csv(build("1f1b", 2, 2), tmp_path / "file.csv")
        assert judge(check_csv("compute_only", reader), tmp_path / "file.csv")[0] is verdict
    (tmp_path / "file.csv").write_text("0F0")
    assert judge(check_csv("compute_only"), tmp_path / "file.csv")[0] is Verdict.REFUSED
