"""Every schedule of ours over meshes ends by NCCL's rules, with the bits that it has over Gloo."""

from __future__ import annotations

import math

import pytest

from autosplit.pipeline.builders.build import SCHEDULES
from tests.ranks import Ranks

from . import chosen, schedules

SLICE = [("pp=2", each) for each in SCHEDULES]
LATE = "strict:ms=3,seed=5"


def _holds(on_ranks: Ranks, cells: list[tuple[str, str]], texts: list[str]) -> None:
    ranks = math.prod(schedules.MESHES[cells[0][0]])
    for found in on_ranks(schedules.compared, ranks, (cells, texts), timeout=300):
        assert {*found.values()} == {"equal"}, found
        assert len(found) == len(cells) * len(texts)


def test_all_schedules_on_two_ranks(on_ranks: Ranks) -> None:
    _holds(on_ranks, [("pp=2", each) for each in SCHEDULES], [LATE])


@pytest.mark.parametrize("mesh", schedules.MESHES)
@pytest.mark.skipif(chosen() is None, reason="with --comm strict: takes minutes")
def test_all_schedules_over_meshes(on_ranks: Ranks, mesh: str) -> None:
    _holds(on_ranks, [(mesh, each) for each in SCHEDULES], [LATE, "strict:eager=1"])
