"""Stages of DTensors on a mesh of one rank: how their gradients are added up."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.pipelining import SplitPipelineStage, weight_gradients
from autosplit.torch_internals.version import TORCH
from tests.semantics.parallel.test_tensor_parallel import Mlp

from .programs import CPU, mean_square

STAGES = 2

pytestmark = pytest.mark.skipif(
    TORCH < (2, 12), reason="torch's own stage sends to its own rank, which Gloo does not"
)


class Products(TorchDispatchMode):
    """The most results of matrix products that are alive at once in a W."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.made.append(weakref.ref(result))
            self.most = max(self.most, sum(each() is not None for each in self.made))
        return result


class Pipeline:
    """Stages of one rank, that share their tensors with nobody."""

    def __init__(self, kind: Any) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        plan: dict[str, Any] = {}
        for at in range(2):
            plan |= {
                f"{at}.norm": SequenceParallel(),
                f"{at}.up": ColwiseParallel(input_layouts=Shard(1)),
                f"{at}.down": RowwiseParallel(output_layouts=Shard(1)),
            }
        self.parts: list[Any] = [
            parallelize_module(nn.Sequential(Mlp(), Mlp()), mesh, plan) for _ in range(STAGES)
        ]
        stages = [kind(part, at, STAGES, CPU) for at, part in enumerate(self.parts)]
        self.schedule = ScheduleInterleavedZeroBubble(
            stages, 2, loss_fn=mean_square, scale_grads=False
        )
        self.data = torch.Generator(torch.get_default_device()).manual_seed(1)

    def step(self) -> None:
        x, y = (torch.randn(4, 2, 8, generator=self.data) for _ in range(2))
        self.schedule.step(x, target=y)

    def gradients(self) -> list[Any]:
        return [parameter.grad for part in self.parts for parameter in part.parameters()]


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Pipeline, Pipeline]]:
    """Pipelines of our stages and of torch's, after two steps."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    patch = pytest.MonkeyPatch()
    patch.setattr(weight_gradients, "_SMALL", 0)  # added inside of W, as large gradients are
    try:
        pair = Pipeline(SplitPipelineStage), Pipeline(PipelineStage)
        for each in pair:
            each.step()
            each.step()
        yield pair
    finally:
        patch.undo()
        dist.destroy_process_group()


def assert_alike(both: tuple[Pipeline, Pipeline]) -> None:
    mine, torchs = (pipeline.gradients() for pipeline in both)
    for one, other in zip(mine, torchs, strict=True):
        assert (one.placements, one.stride()) == (other.placements, other.stride())
        assert torch.equal(one.to_local(), other.to_local())


def test_gradients_are_the_dtensors_of_torchs_stage(both: tuple[Pipeline, Pipeline]) -> None:
    assert_alike(both)
    lying = {str(each.placements) for each in both[0].gradients()}
    assert lying >= {"(Shard(dim=0),)", "(Partial(sum),)"}


def test_weight_gradients_join_the_sums_one_by_one(both: tuple[Pipeline, Pipeline]) -> None:
    """Rather than be held until all of a microbatch are there, to be handed to autograd."""
    pipeline, torchs = both
    for each in both:
        for part in each.parts:
            part.zero_grad()
    torchs.step()
    with Products():  # torch 2.15 captures anew under a mode
        pipeline.step()
    torchs.step()
    before = pipeline.gradients()
    with Products() as products:
        pipeline.step()
    assert all(a is b for a, b in zip(before, pipeline.gradients(), strict=True))
    assert len(products.made) >= 4 * 2 * STAGES
    assert products.most <= 2


def test_gradient_that_lies_otherwise_is_added_to_as_autograd_does(
    both: tuple[Pipeline, Pipeline],
) -> None:
    """Somebody has reduced it in between."""
    for pipeline in both:
        for part in pipeline.parts:
            for parameter in part.parameters():
                lying = parameter.placements
                parameter.grad = parameter.grad.redistribute(placements=lying)
        pipeline.step()
    assert_alike(both)
