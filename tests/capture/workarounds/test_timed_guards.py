"""Torch times guards when it has made them; a capture does not wait for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.guards
from torch import nn

import autosplit


def test_guards_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []

    def profile(*args: Any) -> float:
        timed.append(args)
        return 0.0

    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", profile)
    autosplit.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))(torch.ones(1, 2))
    assert not timed
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert timed  # torch itself does: else skip_guard_timing has nothing to do
