"""Pipelines with replicas, over real Gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autosplit.errors import PipelineError
from tests.all_true import assert_all
from tests.mesh import workers
from tests.ranks import Ranks

Results = list[dict[str, Any]]

KNOWN = "'pp' (the stages of one pipeline), 'dp_replicate' (replicas of it, each with its own share"
SAID = {
    "dp": f"mesh dimension 'dp' is not supported; those that are: {KNOWN}",
    "nameless": "the dimensions of the mesh of (2, 2) ranks have no names: init_device_mesh(",
    "tp": "the mesh has 2 ranks along 'tp', and no parameter of any stage is shared by them",
    "half": "the mesh (pp=2) is of 2 ranks, [0, 1], and the process group has 4, 0 to 3",
    "no mesh": "mesh is a DeviceMesh of torch.distributed.device_mesh; got a str",
    "ranks": "ranks=2 has no effect beside mesh, which says who takes part",
    "two meshes": "every rank must be given the same mesh, but its pipelines are ((0, 2), (1, 3))",
    "two names": "every rank must be given the same mesh, but its pipelines are at the places",
    "long": "the mesh has 4 ranks along 'pp' for 2 stages: each needs at least one stage",
    "cuda": "the mesh is one of 'cpu' devices, but the stages go to meta: init_device_mesh('meta'",
    "shapes": "the inputs are float32[8, 6] on rank 0 and float32[4, 6] on rank 1; give every rank",
    "any shape": "the inputs are float32[8, 6] on rank 0 and float32[4, 6] on rank 1; give each",
    "built differently": "the ranks 2 and 3 hold replicas of the same stages, which must be built",
}


@pytest.fixture(scope="module")
def four(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("mesh")
    return on_ranks(workers.four_ranks, 4, (folder,), timeout=200)


@pytest.mark.parametrize("case", [*workers.EXACT, "no pipeline"])
def test_losses_gradients_and_norm(four: Results, case: str) -> None:
    """Bit for bit those of autograd in one process, which averages the shares of two."""
    for found in four:
        assert_all(found[case])


@pytest.mark.parametrize("case", ["reductions", "saved"])
def test_what_all_ranks_find_right(four: Results, case: str) -> None:
    """Each bucket is reduced once a step; a checkpoint is taken up by
    the same mesh bit for bit, and by other ones.
    """
    for found in four:
        assert_all(found[case])


def test_a_whole_model_is_cut_for_the_pipeline(four: Results) -> None:
    assert [found["whole"] for found in four] == [True] * 4


def test_a_stage_is_reduced_while_the_other_of_its_rank_is_computed(four: Results) -> None:
    for found in four:
        order = found["under way"]
        one, other = dict.fromkeys(each[0] for each in order if "W" in each)
        first, second = order.index(f"{one}W1"), order.index(f"{other}W1")
        assert first < order.index("reduction") < second


def test_what_replicas_share(four: Results) -> None:
    """They start with one model, keep its buffers, and each has its own losses; parameters without
    a gradient stay without, steps accumulate, and all find one schedule.
    """
    for found in four:
        also = dict(found["also"])
        assert also.pop("timeline") == ["0REDUCE_GRAD", "1REDUCE_GRAD"]
        assert_all(also)


@pytest.mark.parametrize("case", SAID)
def test_what_is_refused(four: Results, case: str) -> None:
    for found in four:
        assert SAID[case] in found["refused"][case]


def test_a_killed_rank_ends_all_replicas(on_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(PipelineError):
        on_ranks(workers.with_a_death, 4, (tmp_path,), timeout=60)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)]
    how = ("rank 3 was killed by SIGKILL", "rank 3 ended without a word")  # once it is reaped
    assert all(each.startswith(how) for each in said)
