"""Faults of what a schedule moves away and runs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.torch_csv import TORCH_FORMATS, read_csv, write_csv
from autosplit.pipeline.validation.validate import validate
from autosplit.pipelining import torch_schedule
from tests.pipeline.tables import rows_of, schedule_of

OWNER, OTHER = "0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1", "1F0 1B0 1F1 1B1"


def moving(first: str, second: str = OTHER) -> Schedule:
    return schedule_of(first, second, split_backward=False)


def test_a_journey_to_the_host_and_a_forward_run_again_are_legal() -> None:
    validate(moving("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0RECOMPUTE1 0B1"))
    validate(moving("0F0 0OFFLOAD0 0AWAIT0 0F1 0RELOAD0 0B0 0RECOMPUTE1 0B1"))


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (
            "0F0 0OFFLOAD0 0F1 0B0 0RELOAD0 0B1",
            "0B0 finds what is offloaded, expected held or back",
        ),
        ("0F0 0F1 0RELOAD0 0B0 0B1", "0RELOAD0 finds what is held, expected offloaded"),
        (
            "0F0 0OFFLOAD0 0F1 0RELOAD0 0RELOAD0 0B0 0B1",
            "0RELOAD0 finds what is back and not used, expected offloaded",
        ),
        ("0OFFLOAD0 0F0 0F1 0RELOAD0 0B0 0B1", "0OFFLOAD0 finds what is not there yet"),
        ("0F0 0OFFLOAD0 0F1 0B1", "0OFFLOAD0 leaves what is offloaded, and nothing"),
        (
            "0F0 0OFFLOAD0 0F1 0RELOAD0 0OFFLOAD0 0RELOAD0 0B0 0B1",
            "0OFFLOAD0 finds what is back and not used, expected held",
        ),
        ("0F0 0AWAIT0 0F1 0B0 0B1", "0AWAIT0 finds what is held, expected offloaded"),
        (
            "0F0 0F1 0RECOMPUTE0 0RECOMPUTE0 0B0 0B1",
            "0RECOMPUTE0 finds what is held, expected not there before its RECOMPUTE",
        ),
        (
            "0F0 0F1 0B0 0RECOMPUTE0 0B1",
            "0B0 finds what is not there before its RECOMPUTE, expected held",
        ),
        (
            "0F0 0OFFLOAD0 0F1 0RELOAD0 0RECOMPUTE0 0B0 0B1",
            "0OFFLOAD0 finds what is not there before its RECOMPUTE",
        ),
        ("0F0 1OFFLOAD0 0F1 0B0 0B1", "1OFFLOAD0 is on rank 0, but rank 1 holds stage 1"),
    ],
)
def test_what_moves_wrongly_is_refused(first: str, fault: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(moving(first))
    assert fault in str(caught.value)


@pytest.mark.parametrize("form", TORCH_FORMATS)
def test_torch_has_none_of_these_actions(form: str, tmp_path: Path) -> None:
    """And the advice is one that works."""
    schedule = moving(OWNER)
    with pytest.raises(ScheduleError, match=r"such as 0OFFLOAD0, which torch .*'with_memory'"):
        write_csv(schedule, tmp_path / "file.csv", form)
    with pytest.raises(ScheduleError, match="such as 0OFFLOAD0, which torch"):
        torch_schedule(schedule, [])
    write_csv(schedule, tmp_path / "file.csv", "with_memory")
    back = read_csv(tmp_path / "file.csv", name=schedule.name)
    assert back == schedule
    assert rows_of(back) == [OWNER, OTHER]
