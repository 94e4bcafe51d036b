"""Every schedule of ours over meshes ends by NCCL's rules, with the bits that it has over Gloo."""

from __future__ import annotations

import math

import pytest

from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.torch_internals import TORCH
from tests.all_true import assert_all
from tests.kept_ranks import Ranks
from tests.pipelining.programs import V_SHAPED

from . import chosen, schedules
from .schedules import MESHES, TORCHS

LATE = "strict:ms=1,seed=5"


def _holds(on_ranks: Ranks, mesh: str, *texts: str) -> None:
    cells = [(mesh, name) for name in SCHEDULES]
    ranks, inputs = math.prod(MESHES[mesh]), (cells, texts)
    # Eight ranks on two cores beside other work take minutes for a schedule.
    for result in on_ranks(schedules.compared, ranks, inputs, timeout=300 * ranks):
        assert {*result.values()} == {"equal"}, result
        assert len(result) == len(cells) * len(texts)


def test_all_schedules_on_two_ranks(on_ranks: Ranks) -> None:
    _holds(on_ranks, "pp=2", LATE)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.skipif(chosen() is None, reason="with --comm strict: takes minutes")
def test_all_schedules_over_meshes(on_ranks: Ranks, mesh: str) -> None:
    _holds(on_ranks, mesh, "strict", LATE)


@pytest.mark.skipif(chosen() is None, reason="with --comm strict: takes minutes")
def test_communicators_made_eagerly_that_share_a_connection(on_ranks: Ranks) -> None:
    _holds(on_ranks, "pp=2,dp_replicate=2", "strict:eager=1,one_connection=1,ms=2,seed=1")


def test_torchs_schedules_with_its_stages_and_ours(on_ranks: Ranks) -> None:
    kinds = [kind for kind in TORCHS if TORCH >= (2, 12) or kind not in V_SHAPED]
    for result in on_ranks(schedules.torchs_compared, 2, (LATE, kinds), timeout=120):
        assert_all(result)
