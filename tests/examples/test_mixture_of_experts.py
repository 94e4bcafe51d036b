"""The example with experts trains them on four ranks."""

from __future__ import annotations

import dataclasses

import pytest

from examples import mixture_of_experts

pytestmark = pytest.mark.usefixtures("launched_on_ranks")


def test_the_loss_of_a_mixture_of_experts_falls() -> None:
    small = dataclasses.replace(mixture_of_experts.CONFIG, layers=2, seq=16)
    losses = mixture_of_experts.main(steps=4, config=small)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
