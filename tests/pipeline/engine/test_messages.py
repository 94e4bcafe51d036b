"""Messages under rendezvous semantics: what the lowering lists never hangs, what is swapped may."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.validation.torch_csv import add_communication
from tests.pipeline.engine.strict_messages import check_messages
from tests.pipeline.tables import schedule_of, small

PLAIN = schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", split_backward=False)


def rows(*texts: str) -> list[list[Action]]:
    return [[Action.parse(text) for text in row.split()] for row in texts]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 10))
def test_no_schedule_hangs(name: str, ranks: int, microbatches: int) -> None:
    schedule = small(name, ranks, microbatches)
    check_messages(schedule, add_communication(schedule))


def test_two_ranks_that_both_send_first_hang() -> None:
    crossed = rows(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    with pytest.raises(ScheduleError) as caught:
        check_messages(PLAIN, crossed)
    assert str(caught.value) == (
        "the messages of 'table' hang when a send waits for its receive: rank 0 waits at 0B0; "
        "rank 1 waits at 1F1; rank 0 and rank 1 stand at send 0F1; rank 1 and rank 0 stand at "
        "send 1I0"
    )
    check_messages(PLAIN, add_communication(PLAIN))


def test_a_receive_without_its_send_hangs() -> None:
    complete = [list(row) for row in add_communication(PLAIN)]
    complete[0].remove(Action.parse("0SEND_F1"))
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F1"):
        check_messages(PLAIN, complete)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["1f1b", "zb-v", "interleaved"]), st.integers(2, 3), st.data())
def test_a_message_left_out_is_found(name: str, ranks: int, data: st.DataObject) -> None:
    schedule = small(name, ranks, 3)
    complete = [list(row) for row in add_communication(schedule)]
    messages = [
        (rank, place)
        for rank, row in enumerate(complete)
        for place, action in enumerate(row)
        if not action.kind.is_compute
    ]
    rank, place = data.draw(st.sampled_from(messages))
    del complete[rank][place]
    with pytest.raises(ScheduleError, match="hang when a send waits for its receive"):
        check_messages(schedule, complete)
