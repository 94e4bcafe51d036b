"""Stages that fully_shard has sharded, under torch's schedules: four Gloo ranks, pp 2 x dp 2."""

from __future__ import annotations

import pytest

from autosplit.torch_internals.pipelining_schedules import SUPPORTED
from autosplit.torch_internals.version import TORCH
from tests.rank_cases import all_of
from tests.ranks import Ranks

from .sharded_workers import CASES

pytestmark = pytest.mark.skipif(
    TORCH not in SUPPORTED, reason="another torch.distributed.pipelining"
)


@pytest.fixture(scope="module")
def ranks(on_ranks: Ranks) -> list[dict[str, list[str]]]:
    return on_ranks(all_of, 4, ("tests.pipelining.sharded_workers",), timeout=150)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(ranks: list[dict[str, list[str]]], case: str) -> None:
    for rank, found in enumerate(ranks):
        assert found[case] == [], f"rank {rank}: {found[case]}"
