"""Random generators are put back, and no more of them are touched than there are in use."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from autosplit.device import generators_kept


def test_what_is_drawn_inside_is_drawn_again() -> None:
    with generators_kept():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(("in_use", "expected"), [(False, []), (True, [0, 1])])
def test_gpus_that_nobody_uses_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, in_use: bool, expected: list[int]
) -> None:
    """Setting them up takes memory on each, and forbids to fork the process."""
    asked: list[Any] = []

    def fork_rng(devices: Any) -> contextlib.AbstractContextManager[None]:
        asked.append(devices)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with generators_kept():
        pass
    assert asked == [expected]
