"""Actions as text, and those of sharded stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import with_sharding, without_sharding
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.tables import rows_of, schedule_of

# --- actions as text ------------------------------------------------------------------------------


COUNTS = st.integers(min_value=0, max_value=10**6)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F1", Action(0, ActionKind.FORWARD, 1)),
        ("2I0", Action(2, ActionKind.BACKWARD_INPUT, 0)),
        ("1W3", Action(1, ActionKind.BACKWARD_WEIGHT, 3)),
        ("0B2", Action(0, ActionKind.BACKWARD, 2)),
        ("1SEND_F0", Action(1, ActionKind.SEND_F, 0)),
        ("12RECV_B34", Action(12, ActionKind.RECV_B, 34)),
        ("3OFFLOAD2", Action(3, ActionKind.OFFLOAD, 2)),
        ("0RECOMPUTE7", Action(0, ActionKind.RECOMPUTE, 7)),
        ("2REDUCE_GRAD", Action(2, ActionKind.REDUCE_GRAD, 0)),
        ("0UNSHARD", Action(0, ActionKind.UNSHARD, 0)),
        ("11RESHARD", Action(11, ActionKind.RESHARD, 0)),
    ],
)
def test_text_of_an_action(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@settings(deadline=None)
@given(COUNTS, st.sampled_from(ActionKind), COUNTS)
def test_every_action_survives_its_text(stage: int, kind: ActionKind, microbatch: int) -> None:
    action = Action(stage, kind, 0 if kind.is_whole else microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "0F",
        "F1",
        "0X1",
        "0f1",
        "-1F0",
        "0F1 ",
        "0 F 1",
        "²F1",
        "00F1",
        "0F01",
        "0REDUCE_GRAD1",
        "0UNSHARD1",
    ],
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    assert str(caught.value) == (
        "expected an action such as '0F1' (stage, kind, microbatch), numbers of at most 9 digits "
        f"without leading zeros, got {text!r}; known kinds: F, I, W, B, SEND_F, RECV_F, SEND_B, "
        "RECV_B, WAIT_SEND_F, WAIT_SEND_B, OFFLOAD, RELOAD, AWAIT, "
        "RECOMPUTE, REDUCE_GRAD, WAIT_REDUCE_GRAD, UNSHARD, RESHARD"
    )


def test_a_kind_that_is_much_like_one_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"RESHARD; did you mean 'SEND_F'"):
        Action.parse("0SENDF1")


# --- UNSHARD and RESHARD in schedules -------------------------------------------------------------


def test_a_stage_is_gathered_from_its_first_action_to_its_last() -> None:
    plain = build("1f1b", 2, 2)
    schedule = with_sharding(plain)
    validate(schedule)
    first, last = rows_of(schedule)
    assert (first.split()[0], first.split()[-1]) == ("0UNSHARD", "0RESHARD")
    assert (last.split()[0], last.split()[-1]) == ("1UNSHARD", "1RESHARD")
    assert first.count("UNSHARD") == last.count("UNSHARD") == 1
    assert without_sharding(schedule) == plain
    assert with_sharding(plain, [1]).ranks == (plain.ranks[0], schedule.ranks[1])
    assert with_sharding(schedule) is schedule


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("0F0 0UNSHARD 0I0 0W0", "0F0 on rank 0 finds parameters sharded, expected gathered"),
        ("0UNSHARD 0F0 0RESHARD 0I0 0W0", "0I0 on rank 0 finds parameters sharded, expected"),
        (
            "0UNSHARD 0UNSHARD 0F0 0I0 0W0",
            "0UNSHARD on rank 0 finds parameters gathered, exp",
        ),
        ("0RESHARD 0F0 0I0 0W0", "0RESHARD on rank 0 finds parameters sharded, expected gathered"),
        ("1UNSHARD 0F0 0I0 0W0", "1UNSHARD is on rank 0, but rank 1 holds stage 1"),
        ("2UNSHARD 0F0 0I0 0W0", "2UNSHARD: no stage 2; expected 0 to 1"),
    ],
)
def test_what_is_read_while_it_is_sharded(row: str, fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        validate(schedule_of(row, "1F0 1I0 1W0", microbatches=1))
