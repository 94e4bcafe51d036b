"""Every expectation, by its name; all of them in one launch."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks

from .bench import CASES
from .runs import run_all


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, on_ranks: Ranks) -> dict[str, str]:
    """Of the cases that were asked for."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    return on_ranks(run_all, 2, (names,), timeout=240.0)[0]


@pytest.mark.parametrize("name", CASES)
def test_ours_is_as_expected(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]
