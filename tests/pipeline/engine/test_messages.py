"""Messages under rendezvous semantics: what the lowering lists never hangs, what is swapped may."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.communicators import Stuck, stuck
from autosplit.pipeline.validation.programs import of_torch
from autosplit.pipeline.validation.torch_csv import add_communication
from tests.pipeline.tables import small


def listed(schedule: Schedule) -> list[list[Action]]:
    return [*map(list, add_communication(schedule))]


def hangs(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> Stuck | None:
    """With both directions of a pair in one queue."""
    return stuck(of_torch(rows, schedule.placement, "pair"))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 10))
def test_no_schedule_hangs(name: str, ranks: int, microbatches: int) -> None:
    schedule = small(name, ranks, microbatches)
    assert hangs(schedule, listed(schedule)) is None


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["1f1b", "zb-v", "interleaved"]), st.integers(2, 3), st.data())
def test_a_message_left_out_is_found(name: str, ranks: int, data: st.DataObject) -> None:
    schedule = small(name, ranks, 3)
    rows = listed(schedule)
    messages = [
        (rank, action) for rank, row in enumerate(rows) for action in row if action.kind.is_message
    ]
    rank, action = data.draw(st.sampled_from(messages))
    rows[rank].remove(action)
    assert "never comes" in str(hangs(schedule, rows))
