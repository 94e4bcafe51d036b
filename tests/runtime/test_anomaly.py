"""``torch.autograd.detect_anomaly()`` over I, W and B: of stages, trainers and torch's runtime."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import autosplit
from autosplit import PipelineTrainer, Stage
from autosplit.errors import AnomalyError
from autosplit.pipelining import SplitPipelineStage
from tests.zoo import Made

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nomaly:UserWarning", "ignore:Error det:UserWarning"
)

_LINE = r"makes the first, for .*test_anomaly.py:\d+ "
INPUT = r"the gradient of [a-z0-9.[]+\]?: aten.mul.Tensor " + _LINE + r".*y \* 0"
WEIGHT = r"the gradient of [a-z.]*inner.weight: aten.mm.default " + _LINE


def in_inputs() -> nn.Module:
    """A module whose I makes NaN: an infinite derivative times 0."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.inner(x)
        return torch.sqrt(y * 0)

    return Made(forward, inner=nn.Linear(4, 4))


def in_weights() -> nn.Module:
    """A module whose W makes NaN: 0 times an infinite input; I makes none."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.nan_to_num(m.inner(x.detach() * torch.inf), 0, 0, 0) + x

    return Made(forward, inner=nn.Linear(4, 4))


class Weighing(nn.Sequential):
    """Equal blocks, a tensor that is neither parameter nor buffer, and a NaN in I."""

    weight = torch.ones(4)

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.weight
        return torch.sqrt(y * 0)


def of_a_stage(module: nn.Module, backward: str = "backward_input") -> None:
    x = torch.ones(4, 4, requires_grad=True)
    stage = Stage(module, [x])
    for microbatch in range(2):  # the second adds to sums
        (out,) = stage.forward(microbatch, [x])
        getattr(stage, backward)(microbatch, [torch.ones_like(out)])
        if backward == "backward_input":
            stage.backward_weight(microbatch)


def of_a_trainer(module: nn.Module) -> None:
    modules = {0: nn.Linear(4, 4), 1: module}
    nn.init.eye_(modules[0].weight)  # type: ignore[arg-type]
    with PipelineTrainer(
        modules.__getitem__, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, 0.1),
        stages=2, microbatches=2, ranks=1, schedule="zb-h1",
    ) as trainer:  # fmt: skip
        trainer.step(torch.ones(4, 4), target=torch.ones(4, 4))


def in_torchs_runtime(module: nn.Module) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        modules = [nn.Linear(4, 4), module]
        stages = [SplitPipelineStage(m, at, 2, "cpu") for at, m in enumerate(modules)]
        schedule = schedules.ScheduleInterleavedZeroBubble(stages, 2, nn.functional.mse_loss)
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    finally:
        dist.destroy_process_group()


def of_split(module: nn.Module) -> None:
    split = autosplit.split(module)
    split(torch.ones(4, 4, requires_grad=True)).sum().backward()
    split.backward_weight()


RUNS: dict[str, Callable[[nn.Module], None]] = {
    "Stage": of_a_stage,
    "Stage, fused": lambda module: of_a_stage(module, "backward"),
    "PipelineTrainer": of_a_trainer,
    "SplitPipelineStage": in_torchs_runtime,
    "split": of_split,
}


@pytest.mark.parametrize("make", [in_inputs, in_weights])
@pytest.mark.parametrize("name", RUNS)
def test_a_nan_is_an_error_that_names_operator_and_line(name: str, make: Any) -> None:
    with torch.autograd.detect_anomaly(), pytest.raises(Exception) as raised:  # noqa: PT011
        RUNS[name](make())
    errors = [*_causes(raised.value)]
    assert any(
        isinstance(error, AnomalyError) and isinstance(error, RuntimeError) for error in errors
    )
    assert any(re.search(INPUT if make is in_inputs else WEIGHT, str(error)) for error in errors)


def test_graphs_with_equal_blocks_and_constants_are_searched() -> None:
    with torch.autograd.detect_anomaly(), pytest.raises(AnomalyError, match=_LINE):
        of_a_stage(Weighing())


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.parametrize("make", [in_inputs, in_weights])
def test_nothing_is_checked_where_the_user_turned_the_check_off(make: Any) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        of_a_stage(make())
    of_a_stage(make())


def test_a_nan_of_the_forward_is_where_it_comes_in() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.inner(torch.log(x - 2))  # type: ignore[no-any-return]

    with torch.autograd.detect_anomaly(), pytest.raises(AnomalyError, match=r"mm.default is given"):
        of_a_stage(Made(forward, inner=nn.Linear(4, 4)))


def test_sparse_gradients() -> None:
    x = torch.tensor([[0, 1]])
    stage = Stage(nn.Embedding(4, 4, sparse=True), [x])
    stage.forward(0, [x])
    stage.backward_input(0, [torch.full((1, 2, 4), torch.nan)])
    with torch.autograd.detect_anomaly(), pytest.raises(AnomalyError, match="gradient of weight"):
        stage.backward_weight(0)
