"""Faults of what a schedule moves away and runs again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.torch_csv import read_csv, write_csv
from autosplit.pipeline.validation.validate import validate
from autosplit.pipelining import torch_schedule
from tests.pipeline.tables import rows_of, schedule_of

OWNER = "0F0 0EVICT0 0F1 0LOAD0 0B0 0B1"
HOLDER = "0ACCEPT0 1F0 0RETURN0 1B0 1F1 1B1"


def paired(first: str, second: str = "1F0 1B0 1F1 1B1") -> Schedule:
    return schedule_of(first, second, split_backward=False)


def test_a_journey_to_the_partner_and_one_to_the_host_are_legal() -> None:
    validate(paired(OWNER, HOLDER))
    validate(paired("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0RECOMPUTE1 0B1"))
    validate(paired("0F0 0OFFLOAD0 0AWAIT0 0F1 0RELOAD0 0B0 0RECOMPUTE1 0B1"))


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (
            "0F0 0EVICT0 0F1 0B0 0LOAD0 0B1",
            HOLDER,
            "0B0: the activations are evicted, expected held or back",
        ),
        ("0F0 0F1 0LOAD0 0B0 0B1", HOLDER, "0LOAD0: the activations are held, expected evicted"),
        (
            "0F0 0EVICT0 0F1 0LOAD0 0LOAD0 0B0 0B1",
            HOLDER,
            "0LOAD0: the activations are back and not used, expected evicted",
        ),
        ("0EVICT0 0F0 0F1 0LOAD0 0B0 0B1", HOLDER, "0EVICT0: the activations are not there yet"),
        ("0F0 0EVICT0 0F1 0B1", HOLDER, "0EVICT0 leaves the activations evicted, and nothing"),
        (
            "0F0 0EVICT0 0OFFLOAD0 0F1 0RELOAD0 0LOAD0 0B0 0B1",
            HOLDER,
            "0OFFLOAD0: the activations are evicted, expected held",
        ),
        (
            "0F0 0OFFLOAD0 0F1 0RELOAD0 0OFFLOAD0 0RELOAD0 0B0 0B1",
            HOLDER,
            "0OFFLOAD0: the activations are back and not used, expected held",
        ),
        (
            "0F0 0AWAIT0 0F1 0B0 0B1",
            "1F0 1B0 1F1 1B1",
            "0AWAIT0: the activations are held, expected evic",
        ),
        (
            "0F0 0EVICT0 0AWAIT0 0F1 0LOAD0 0B0 0B1",
            "1F0 0ACCEPT0 0RETURN0 1B0 1F1 1F1 1B1",
            "1F1 runs 2 times",
        ),
        (
            OWNER,
            "0ACCEPT0 1F0 1B0 1F1 1B1",
            "has 0LOAD0 where its partner, rank 1, has its end",
        ),
        (
            OWNER,
            "0RETURN0 0ACCEPT0 1F0 1B0 1F1 1B1",
            "0RETURN0: the activations are not here, expected here",
        ),
        (
            "0F0 0EVICT0 0F1 0EVICT1 0LOAD0 0LOAD1 0B0 0B1",
            "0ACCEPT1 0ACCEPT0 0RETURN0 0RETURN1 1F0 1B0 1F1 1B1",
            "rank 0 has 0EVICT0 where its partner, rank 1, has 0ACCEPT1",
        ),
        (
            "0F0 0F1 0RECOMPUTE0 0RECOMPUTE0 0B0 0B1",
            "1F0 1B0 1F1 1B1",
            "0RECOMPUTE0: the activations are held, expected not there before its RECOMPUTE",
        ),
        (
            "0F0 0F1 0B0 0RECOMPUTE0 0B1",
            "1F0 1B0 1F1 1B1",
            "0B0: the activations are not there before its RECOMPUTE, expected held",
        ),
        (
            "0F0 0OFFLOAD0 0F1 0RELOAD0 0RECOMPUTE0 0B0 0B1",
            "1F0 1B0 1F1 1B1",
            "0OFFLOAD0: the activations are not there before its RECOMPUTE",
        ),
        (
            "0ACCEPT0 0F0 0F1 0B0 0RETURN0 0B1",
            "1F0 1B0 1F1 1B1",
            "but rank 0 holds stage 0 and has the partner 1",
        ),
    ],
)
def test_invalid_moves_are_refused(first: str, second: str, fault: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(paired(first, second))
    assert fault in str(caught.value)


def test_the_rank_in_the_middle_has_no_partner() -> None:
    alone = schedule_of("0F0 0EVICT0 0F1 0LOAD0 0B0 0B1", stages=1, microbatches=2)
    with pytest.raises(ScheduleError, match="0EVICT0: rank 0 has no partner"):
        validate(replace(alone, split_backward=False))


def test_partners_that_wait_for_each_other_are_a_deadlock() -> None:
    """Each takes in only after what needs the other's."""
    owner = "0F0 0EVICT0 0F1 0LOAD0 0B0 0B1"
    holder = "1F0 1B0 1F1 1B1 0ACCEPT0 0RETURN0"
    late = paired(owner, holder)
    validate(late)  # 0B0 waits, and nobody waits for it
    with pytest.raises(ScheduleError, match=r"deadlock: .*0LOAD0|deadlock: .*0B0"):
        validate(
            paired(
                "0F0 0EVICT0 0LOAD0 0B0 0F1 0B1",
                "1F0 1B0 1F1 0ACCEPT0 0RETURN0 1B1",
            )
        )


def test_torch_has_none_of_these_actions(tmp_path: Path) -> None:
    schedule = paired(OWNER, HOLDER)
    with pytest.raises(ScheduleError, match="such as 0EVICT0, which torch"):
        torch_schedule(schedule, [])
    write_csv(schedule, tmp_path / "file.csv")
    returned = read_csv(tmp_path / "file.csv", name=schedule.name)
    assert returned == schedule
    assert rows_of(returned) == [OWNER, HOLDER]
