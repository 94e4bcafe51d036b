"""Comparisons that ranks made, which must all have held."""

from __future__ import annotations

from collections.abc import Mapping


def assert_all(comparisons: Mapping[str, object]) -> None:
    """There is at least one, and every one of them is True."""
    wrong = {name: item for name, item in comparisons.items() if item is not True}
    assert comparisons, "nothing was compared"
    assert not wrong, wrong
