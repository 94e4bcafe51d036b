"""Training with two copies of the stages, over real Gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.all_true import assert_all
from tests.pipeline.training import two_way_workers
from tests.ranks import Ranks

Results = list[dict[str, Any]]

SAID = {
    "written buffer": "the forward of stage 1 writes its buffer '1.",
    "built differently": (
        "the ranks 0 and 1 hold copies of the same stages, which must be built alike: rank 0 has "
        "stage 0's bias: float32[6], trained, rank 1 has nothing more"
    ),
    "one for both": (
        "the stages 0 and 1 hold one parameter, '0.weight' of stage 0: name it in shared_parameters"
    ),
    "two batches": "give every rank the same batch",
    "failing copy": "rank 0 failed in 1F1: ValueError: bad weather",
    "one microbatch": "schedule 'lone' has two copies of the stages and one microbatch, so that",
    "odd count": "'chimera' needs an even number of ranks and of microbatches; got 2 ranks and 3",
}


@pytest.fixture(scope="module")
def two(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return on_ranks(two_way_workers.two_ranks, 2, (folder,), timeout=90)


@pytest.fixture(scope="module")
def four(on_ranks: Ranks) -> Results:
    return on_ranks(two_way_workers.four_ranks, 4, timeout=90)


@pytest.mark.parametrize(
    "case",
    [f"chimera, {each}" for each in ("M=2", "M=6", "fused", "blocks")] + ["dualpipe"],
)
def test_losses_and_gradients(two: Results, case: str) -> None:
    for found in two:
        assert_all(found[case])


@pytest.mark.parametrize("case", ["chimera, M=4", "dualpipe", "tied"])
def test_losses_and_gradients_on_four_ranks(four: Results, case: str) -> None:
    for found in four:
        assert_all(found[case])


def test_training_steps(two: Results) -> None:
    for found in two:
        assert_all(found["training"])


@pytest.mark.parametrize("case", ["exact", "unused"])
def test_what_else_is_as_with_one_copy(two: Results, case: str) -> None:
    assert [found[case] for found in two] == [True, True]


def test_sums_start_before_the_rank_is_done(two: Results) -> None:
    """The last stage's gradients are complete on both ranks while the first still runs."""
    for found in two:
        assert found["overlapped"][-4:] == [
            "weights of stage 1",
            "sum of stage 1",
            "weights of stage 0",
            "sum of stage 0",
        ]


def test_checkpoints_hold_each_parameter_once(two: Results) -> None:
    assert [found["checkpoints"] for found in two] == [{"one": True, "two": True}] * 2


@pytest.mark.parametrize("scenario", SAID)
def test_refusals(two: Results, scenario: str) -> None:
    for found in two:
        assert SAID[scenario] in found["refusals"][scenario][1]
