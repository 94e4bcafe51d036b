"""Random generators are put back, and no more of them are touched than there are in use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosplit.device import GeneratorStates, generators_kept


def test_what_is_drawn_inside_is_drawn_again() -> None:
    with generators_kept():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)


def test_what_was_drawn_is_drawn_again_from_states_that_were_kept() -> None:
    states = GeneratorStates.of([torch.ones(1)])
    first = torch.rand(3)
    with states.again():
        again = torch.rand(3)
    second = torch.rand(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("in_use", "expected"), [(False, []), (True, [0, 1])])
def test_gpus_that_nobody_uses_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, in_use: bool, expected: list[int]
) -> None:
    """Setting them up takes memory on each, and forbids to fork the process."""
    asked: list[int | None] = []
    kept: list[tuple[int | None, Any]] = []

    def get_rng_state(device: torch.device) -> int | None:
        asked.append(device.index)
        return device.index

    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: in_use,
        device_count=lambda: 2,
        get_rng_state=get_rng_state,
        set_rng_state=lambda state, device: kept.append((device.index, state)),
    )
    monkeypatch.setattr("autosplit.device._accelerator", lambda: ("cuda", cuda))
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    with generators_kept():
        assert asked == expected
        assert kept == []
    assert kept == [(index, index) for index in expected]
