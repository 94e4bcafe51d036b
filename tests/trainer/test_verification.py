"""``PipelineTrainer.verify``: the gradients of a step beside plain autograd, without a trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline import Recorder
from autosplit.runtime.functions import SplitFunctions
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers
from tests.pipeline.workers import WIDTH
from tests.trainer.test_rank_model import Drawing

OWN_STAGES: dict[str, Any] = {"stage_factory": None}
TIED: dict[str, Any] = {"shared_parameters": [[(0, "inner.0.weight"), (2, "inner.0.weight")]]}


def state(trainer: PipelineTrainer) -> list[Any]:
    """Everything that a step changes."""
    tensors = [t.clone() for row in trainer.state_dict().values() for t in row.values()]
    gradients = [g.clone() for row in trainer.gradients().values() for g in row.values()]
    return [*tensors, *gradients, torch.get_rng_state(), trainer.metrics()["skipped"]]


def assert_unchanged(earlier: list[Any], trainer: PipelineTrainer) -> None:
    after = state(trainer)
    assert len(after) == len(earlier)
    for one, other in zip(earlier, after, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 3, "split_backward": False, **TIED},
        {"stages": 4, "schedule": "zb-v", "grad_dtype": torch.float64},
        {"stages": 2, "schedule": "1f1b", "memory_limit": "1GiB"},
    ],
)
def test_gradients_have_the_bits_of_autograd_and_no_state_changes(options: dict[str, Any]) -> None:
    """Random numbers and buffers included; a step after it is the one that would have been."""
    steps = []
    for verifies in (False, True):
        torch.manual_seed(3)
        with workers.trainer(Drawing, nonfinite="skip", **OWN_STAGES, **options) as trainer:
            if verifies:
                assert trainer.verify(workers.data(8)).bits_equal
            trainer.step(workers.data(8))
            trainer.forward_backward(workers.data(8, seed=1))
            if verifies:
                earlier = state(trainer)
                report = trainer.verify(workers.data(8, seed=2), weight=[1.0, 2.0, 1.0, 3.0])
                assert_unchanged(earlier, trainer)
                assert (report.plain, [*report.differences]) == (True, [])
                assert str(report) == "gradients have the bits of plain autograd"
            steps.append([trainer.step(workers.data(8, seed=3)), *state(trainer)])
    for one, other in zip(*steps, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@ranks(2)
@pytest.mark.parametrize("value", [None, math.nan])
def test_a_wrong_gradient_is_named_on_all_ranks(value: float | None) -> None:
    """One bit on rank 1; or a NaN, as infinite. Nothing is raised."""
    original, rank = SplitFunctions.backward_weight, dist.get_rank()

    def damage(*args: Any) -> Any:
        gradients = original(*args)
        if rank == 1:
            part = gradients[-1][3:4]
            part.view(torch.int32).bitwise_xor_(1) if value is None else part.fill_(value)
        return gradients

    with workers.trainer(**OWN_STAGES) as trainer:
        with mock.patch.object(SplitFunctions, "backward_weight", damage):
            report = trainer.verify(workers.data(8))
        assert not report.bits_equal
        [(gap, stage, name)] = report.differences
        assert (stage, name) == (1, "0.bias")
        assert gap == math.inf if value is not None else 0 < gap < 1e-5
        text = "gradients differ from plain autograd: 0.bias of stage 1 by "
        assert str(report) == f"{text}{gap:.3g}"
        assert trainer.verify(workers.data(8)).bits_equal


class Counting(nn.Module):
    """A parameter whose gradients a hook doubles."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = workers.block(index)
        self.calls: list[str] = []
        weight = self.inner[0].weight
        weight.register_hook(lambda grad: 2 * grad)
        weight.register_post_accumulate_grad_hook(lambda _: self.calls.append("post"))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_hooks_for_the_gradients_of_a_step_are_not_called() -> None:
    """Hooks that change gradients are."""
    with workers.trainer([Counting(0), Counting(1)], ranks=1, **OWN_STAGES) as trainer:
        assert trainer.verify(workers.data(8)).bits_equal
        assert [module.calls for module in trainer.modules.values()] == [[], []]
        trainer.step(workers.data(8))
        assert [module.calls for module in trainer.modules.values()] == [["post"], ["post"]]


def test_a_list_of_microbatches_is_verified() -> None:
    with workers.trainer([nn.Linear(WIDTH, WIDTH)], ranks=1, **OWN_STAGES) as trainer:
        pairs = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for size in (2, 3)]
        assert trainer.verify(microbatches=pairs).bits_equal


def test_verified_gradients_are_not_recorded(tmp_path: Path) -> None:
    options = {"recorder": Recorder(tmp_path, log=tmp_path / "log"), **OWN_STAGES}
    with workers.trainer([nn.Linear(WIDTH, WIDTH)], ranks=1, **options) as trainer:
        for _ in range(2):
            assert trainer.verify(workers.data(8)).bits_equal
            trainer.step(workers.data(8))
    (lines,) = (tmp_path / "log").iterdir()
    assert len(lines.read_text().splitlines()) == 2


def test_a_batch_of_a_new_shape_leaves_the_metrics_of_the_last_step() -> None:
    with workers.trainer([nn.Linear(WIDTH, WIDTH)], ranks=1, **OWN_STAGES) as trainer:
        trainer.step(workers.data(8))
        rate, seconds = trainer.metrics()["samples_per_s"], trainer.metrics()["seconds"]
        assert trainer.verify(workers.data(16)).bits_equal
        assert trainer.metrics()["samples_per_s"] == rate
        assert trainer.metrics()["seconds"] == seconds
