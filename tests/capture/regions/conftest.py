"""Blocks of the small models here are captured once a kind, whatever that spares."""

from __future__ import annotations

import pytest

from autosplit.runtime import build


@pytest.fixture(autouse=True)
def _capture_all_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "spares_tracing", lambda module: True)
