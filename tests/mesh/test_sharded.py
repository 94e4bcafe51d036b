"""Pipelines whose stages are sharded, over real Gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.all_true import assert_all
from tests.mesh import sharded_workers as workers
from tests.ranks import Ranks

Results = list[dict[str, Any]]

SAID = {
    "plain": "the mesh has 'dp_shard', and parameter '0.0.weight' of stage",
    "whole": "the mesh has 'dp_shard', and a whole model that is cut here is not sharded: give a",
    "partly": "is not sharded: let the function that builds stages call fully_shard(module, mesh=",
    "along pp": "along the trainer's mesh these are [",
    "all ranks": "are sharded over the ranks [0, 1, 2, 3]; along the trainer's mesh these are [",
    "no dimension": "and PipelineTrainer has no mesh with 'dp_shard': give it mesh=init_device",
    "no mesh": "and PipelineTrainer has no mesh with 'dp_shard': give it mesh=init_device",
    "shared": "are shared by several stages (shared_parameters), whose gradients would have to be",
    "limit": "those that are sharded along 'dp_shard' are gathered in a step: leave one of the two",
    "no sync": "are not to be reduced (set_requires_gradient_sync, set_requires_all_reduce): a",
    "factory": "is sharded, and stage_factory=ReferenceStage is to make it: only autosplit.Stage",
    "failing": "rank 3 failed in 1F1: RuntimeError: INDICES element is out of DATA bounds",
}


@pytest.fixture(scope="module")
def four(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("sharded")
    return on_ranks(workers.four_ranks, 4, (folder,), timeout=200)


@pytest.mark.parametrize("case", [*workers.EXACT, "always", "another name"])
def test_a_step_is_that_of_one_process(four: Results, case: str) -> None:
    """Bit for bit that of autograd, which averages the shares of two, with one reduction for each
    parameter group; also where parameters cannot be divided, under a schedule that gathers and
    frees them around each action, and over a mesh of these ranks whose dimension has another name.
    """
    for found in four:
        assert_all(found[case])


@pytest.mark.parametrize("case", ["replicated", "half", "training", "saved"])
def test_what_all_ranks_find_right(four: Results, case: str) -> None:
    """Copies of shards; another dtype; clipped training, taken early or not; checkpoints that the
    same mesh takes up bit for bit, and others, and the other way round.
    """
    for found in four:
        assert_all(found[case])


def test_what_stages_do_between_steps(four: Results) -> None:
    for found in four:
        also = dict(found["also"])
        reduced = ["0REDUCE_GRAD"] * 2 + ["1REDUCE_GRAD"] * 2
        assert also.pop("timeline") == ["0UNSHARD", "1UNSHARD", *reduced]
        assert also.pop("nan") == ["nan", True]
        assert_all(also)


@pytest.mark.parametrize("case", SAID)
def test_what_is_refused(four: Results, case: str) -> None:
    for found in four:
        assert SAID[case] in found["refused"][case]
