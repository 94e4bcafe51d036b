"""The example that cuts a whole model trains it on two ranks."""

from __future__ import annotations

import dataclasses

import pytest

from examples import plan_model

pytestmark = pytest.mark.usefixtures("launched_on_ranks")


def test_the_loss_of_a_planned_model_falls() -> None:
    small = dataclasses.replace(plan_model.CONFIG, layers=1, seq=32)
    losses = plan_model.main(steps=6, seconds=0.1, config=small)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
