"""Our stage accepts the arguments of torch's PipelineStage, and groups for dry runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

import autosplit
from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipelining import SplitPipelineStage, torch_schedule
from autosplit.runtime.functions import SplitFunctions
from autosplit.torch_internals import TORCH

from .programs import CPU, block, mean_square, no_leaked_tensors

_EXAMPLE = torch.randn(2, 4)
_EXAMPLES = (None, _EXAMPLE, (_EXAMPLE,))
VALUES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "submodule": lambda: (nn.Linear(4, 4), autosplit.split(nn.Linear(4, 4))),
    "stage_index": lambda: (0,),
    "num_stages": lambda: (1,),
    "device": lambda: (CPU, "cpu"),
    "input_args": lambda: _EXAMPLES,
    "output_args": lambda: _EXAMPLES,
    "output_grads": lambda: (*_EXAMPLES, (None,)),
    "input_grads": lambda: (*_EXAMPLES, (None,)),
    "group": lambda: (None, dist.group.WORLD, dist.new_group([0])),
    "dw_builder": lambda: (None, lambda: lambda: None),
    "get_mesh": lambda: (None, lambda *_: None),
}
"""Values that the annotation of each argument of torch's stage permits."""
_NAMES = [*inspect.signature(PipelineStage.__init__).parameters][1:]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def step_differs(stage: Any) -> bool:
    """Whether gradients of a step are others than plain autograd's."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    module = stage.submod
    plain = copy.deepcopy(getattr(module, "unsplit", module))
    ScheduleGPipe(stage, 2, loss_fn=mean_square).step(x, target=y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (mean_square(plain(a), b) / 2).backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return not all(torch.equal(mine.grad, other.grad) for mine, other in pairs)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.usefixtures("alone")
def test_each_argument_of_torchs_stage(name: str) -> None:
    for value in VALUES[name]():
        inputs: dict[str, Any] = {"submodule": nn.Linear(4, 4), "stage_index": 0, "num_stages": 1}
        inputs |= {"device": CPU, name: value}
        stage = SplitPipelineStage(**inputs)
        assert not step_differs(stage)
        placed = SplitPipelineStage(*map(inputs.get, _NAMES[: max(4, _NAMES.index(name) + 1)]))  # type: ignore[arg-type]
        assert (placed.group, placed.dw_builder) == (stage.group, stage.dw_builder)


def test_a_fake_group_of_a_store_that_keeps_nothing() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        assert not step_differs(SplitPipelineStage(nn.Linear(4, 4), 0, 1, "cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(
    TORCH < (2, 12), reason="torch's own stage sends to its own rank, which Gloo does not"
)
@pytest.mark.usefixtures("alone")
def test_a_builder_of_weight_updates_is_called_as_by_torch() -> None:
    log: list[str] = []
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def builder(at: int) -> Callable[[], Callable[[], None]]:
        def build() -> Callable[[], None]:
            log.append(f"builds {at}")
            return lambda: log.append(f"runs {at}")

        return build

    def run(kind: Any) -> list[str]:
        log.clear()
        stages = [kind(m, at, 2, CPU, dw_builder=builder(at)) for at, m in enumerate(modules)]
        schedule = schedules.ScheduleInterleavedZeroBubble(stages, 2, loss_fn=mean_square)
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
        return [*log]

    assert run(SplitPipelineStage) == run(PipelineStage) != []


@pytest.mark.usefixtures("alone")
def test_sums_of_gradients_have_the_dtype_that_is_asked_for() -> None:
    module, x, y = nn.Linear(4, 4).bfloat16(), torch.randn(8, 4).bfloat16(), torch.randn(8, 4)
    stage = SplitPipelineStage(copy.deepcopy(module), 0, 1, CPU, grad_dtype=torch.float32)
    ScheduleGPipe(stage, 4, loss_fn=mean_square).step(x, target=y)
    total = torch.zeros(4, 4)
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        total += torch.autograd.grad(mean_square(module(a), b), module.weight)[0]
    assert torch.equal(stage.submod.weight.grad, (total / 4).bfloat16())


@pytest.mark.usefixtures("alone")
def test_weight_gradients_that_follow_each_other_in_the_schedule_run_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[int] = []

    def joined_weight(functions: SplitFunctions, deferred: list[Any], *sums: Any) -> Any:
        runs.append(len(deferred))
        return original(functions, deferred, *sums)

    original = SplitFunctions.joined_weight
    monkeypatch.setattr(SplitFunctions, "joined_weight", joined_weight)
    module, x, y = nn.Linear(4, 4).double(), torch.randn(10, 4), torch.randn(10, 4)
    gradients = []
    for accumulation in ("exact", "auto"):
        stage = SplitPipelineStage(copy.deepcopy(module), 0, 1, CPU, accumulation=accumulation)
        schedule = build("gpipe", 1, 5, ranks=1, weights="2bp")
        torch_schedule(schedule, [stage], mean_square).step(x.double(), target=y.double())
        gradients.append(stage.submod.weight.grad)
    exact, joined = gradients
    torch.testing.assert_close(joined, exact, rtol=0.0, atol=1e-12 * float(exact.abs().max()))
    assert runs == [5]


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """Rank 0 of two, of which the other is not there."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_two")
def test_a_dry_run_of_one_rank() -> None:
    modules = {at: block() for at in (0, 2)}
    stages: list[Any] = [
        SplitPipelineStage(module, at, 4, CPU, torch.randn(4, 4)) for at, module in modules.items()
    ]
    schedule = schedules.ScheduleInterleaved1F1B(stages, 2, loss_fn=mean_square)
    schedule.step(torch.randn(8, 4))
    for module in modules.values():
        assert all(p.grad is not None for p in module.parameters())


@pytest.mark.usefixtures("one_of_two")
def test_a_dry_run_needs_examples_of_what_comes() -> None:
    stages: list[Any] = [SplitPipelineStage(block(), at, 4, CPU) for at in (0, 2)]
    schedule = schedules.ScheduleInterleaved1F1B(stages, 2, loss_fn=mean_square)
    with pytest.raises(PipelineError, match=r"stage 2 .*'fake', no other .*input_args="):
        schedule.step(torch.randn(8, 4))


@pytest.mark.usefixtures("alone")
def test_a_first_step_leaves_no_tensor_in_a_cycle() -> None:
    module = nn.Sequential(*(block() for _ in range(2)))
    stage = SplitPipelineStage(module, 0, 1, CPU)
    schedule = ScheduleGPipe(stage, 2, loss_fn=mean_square)
    with no_leaked_tensors():
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
