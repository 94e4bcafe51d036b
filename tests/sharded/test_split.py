"""A split module that fully_shard has sharded, on two Gloo ranks, beside plain FSDP2."""

from __future__ import annotations

import pytest

from tests.rank_cases import all_of
from tests.ranks import Ranks

from .split_workers import CASES


@pytest.fixture(scope="module")
def ranks(on_ranks: Ranks) -> list[dict[str, list[str]]]:
    return on_ranks(all_of, 2, ("tests.sharded.split_workers",), timeout=150)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_fsdp_does(ranks: list[dict[str, list[str]]], case: str) -> None:
    for rank, found in enumerate(ranks):
        assert found[case] == [], f"rank {rank}: {found[case]}"
