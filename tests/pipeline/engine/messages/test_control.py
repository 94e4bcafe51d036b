"""Of whom a rank hears that it is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from autosplit.pipeline.engine import control
from autosplit.pipeline.engine.control import OTHERS, Control


def test_whoever_announces_loses_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = []

    @contextlib.contextmanager
    def losing(whom: str) -> Iterator[None]:
        lost.append(whom)
        yield

    monkeypatch.setattr(control, "tell_in", lambda value, source, group: value)
    group = cast("Any", object())
    for source in (0, 1):
        assert Control([3, 5], 5, group, losing).announce("plan", source) == "plan"
    assert lost == ["rank 3", OTHERS]
