"""SplitPipelineStage under torch's own schedules, on two Gloo ranks, beside plain autograd."""

from __future__ import annotations

import pytest

from autosplit.torch_internals.pipelining_schedules import SUPPORTED
from autosplit.torch_internals.version import TORCH
from tests.pipelining import stage_workers
from tests.rank_cases import all_of
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    TORCH not in SUPPORTED, reason="another torch.distributed.pipelining"
)


@pytest.fixture(scope="module")
def ranks(on_ranks: Ranks) -> list[dict[str, list[str]]]:
    return on_ranks(all_of, 2, ("tests.pipelining.stage_workers",), timeout=150)


@pytest.mark.parametrize("case", stage_workers.CASES)
def test_gradients_are_those_of_plain_autograd(
    ranks: list[dict[str, list[str]]], case: str
) -> None:
    for found in ranks:
        assert found[case] == []
