"""Actions as text, and those of sharded stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Action, ActionKind

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
        ("3EVICT2", Action(3, ActionKind.EVICT, 2)),
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
        "RECV_B, WAIT_SEND_F, WAIT_SEND_B, EVICT, ACCEPT, LOAD, RETURN, OFFLOAD, RELOAD, AWAIT, "
        "RECOMPUTE, REDUCE_GRAD, WAIT_REDUCE_GRAD, UNSHARD, RESHARD"
    )


def test_a_kind_that_is_much_like_one_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"RESHARD; did you mean 'SEND_F'"):
        Action.parse("0SENDF1")
