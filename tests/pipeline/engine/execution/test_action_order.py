"""Which step a rank takes up next."""

from __future__ import annotations

import random

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.executor import (
    Order,
    Step,
    as_scheduled,
    early_weights,
)
from autosplit.pipeline.schedule.action import Action, ActionKind


def _run(row: str, waits: dict[str, int], order: Order) -> str:
    """``waits``: how often an action's input is not there yet when the rank looks."""
    left = dict(waits)

    def probe(text: str) -> bool:
        left[text] = left.get(text, 0) - 1
        return left[text] < 0

    steps = [
        Step(Action.parse(text), list, list, lambda values: None, lambda text=text: probe(text))
        for text in row.split()
    ]
    return " ".join(str(step.action) for step in order(steps))


ROW = "0F0 0F1 0I0 0F2 0I1 0F3 0I2 0I3 0W0 0W1 0W2 0W3"


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ({}, ROW),
        ({"0I1": 1}, "0F0 0F1 0I0 0F2 0W0 0I1 0F3 0I2 0I3 0W1 0W2 0W3"),
        ({"0I0": 9}, ROW),
        ({"0I1": 9, "0I3": 9}, "0F0 0F1 0I0 0F2 0W0 0I1 0F3 0I2 0W1 0W2 0I3 0W3"),
        ({"0F2": 1, "0I3": 1}, "0F0 0F1 0I0 0W0 0F2 0I1 0F3 0I2 0W1 0I3 0W2 0W3"),
    ],
)
def test_weights_run_while_an_input_is_under_way(waits: dict[str, int], expected: str) -> None:
    assert _run(ROW, waits, early_weights) == expected
    assert _run(ROW, waits, as_scheduled) == ROW


def test_a_weight_is_not_taken_twice_where_the_schedule_has_it() -> None:
    row = "0F0 0F1 0I0 0W0 0I1 0W1"
    assert _run(row, {"0I1": 5, "0W0": 5}, early_weights) == row


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_weights_keep_their_order_and_never_come_later(name: str) -> None:
    chance = random.Random(name)
    for _ in range(50):
        row = [str(action) for action in build(name, 4, 6).ranks[chance.randrange(4)]]
        waits = {text: chance.randrange(4) for text in row}
        found = _run(" ".join(row), waits, early_weights).split()
        assert sorted(found) == sorted(row)
        kinds = {text: Action.parse(text).kind for text in row}
        for weight in (True, False):
            chosen = [
                [t for t in texts if (kinds[t] is ActionKind.BACKWARD_WEIGHT) is weight]
                for texts in (found, row)
            ]
            assert chosen[0] == chosen[1]
        for place, text in enumerate(row):
            if kinds[text] is ActionKind.BACKWARD_WEIGHT:
                before = set(row[:place]) - set(found[: found.index(text)])
                assert found.index(text) <= place, before
