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
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.pipelining import SplitPipelineStage
from autosplit.runtime import compiled_graph
from autosplit.torch_internals import TORCH
from tests.zoo import Residual

from .programs import Program

STAGES = 2
Both = tuple[Program, Program]

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
            self.most = max(self.most, sum(item() is not None for item in self.made))
        return result


def pipeline(kind: Any) -> Program:
    """Stages of one rank, that share their tensors with nobody."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {}
    for at in range(2):
        plan |= {
            f"{at}.norm": SequenceParallel(),
            f"{at}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"{at}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parts = [
        parallelize_module(nn.Sequential(Residual(), Residual()), mesh, plan) for _ in range(STAGES)
    ]
    options = {"schedule_options": {"scale_grads": False}, "stage": kind}
    return Program(parts, "ScheduleInterleavedZeroBubble", 2, **options)


def step(program: Program, seed: int) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x, program.target = (torch.randn(4, 2, 8, generator=generator) for _ in range(2))
    program.args = [x]
    program.step()


def gradients(program: Program) -> list[Any]:
    return [parameter.grad for part in program.parts for parameter in part.parameters()]


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """Pipelines of our stages and of torch's, after two steps."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled_graph, "_SMALL", 0)  # as if all were large
            pair = pipeline(SplitPipelineStage), pipeline(PipelineStage)
            for item in pair:
                step(item, 1)
                step(item, 2)
            yield pair
    finally:
        dist.destroy_process_group()


def assert_alike(both: Both) -> None:
    mine, torchs = map(gradients, both)
    for one, other in zip(mine, torchs, strict=True):
        assert (one.placements, one.stride()) == (other.placements, other.stride())
        # Our step sums its microbatches first.
        torch.testing.assert_close(one.to_local(), other.to_local())


def test_gradients_are_the_dtensors_of_torchs_stage(both: Both) -> None:
    assert_alike(both)
    lying = {str(gradient.placements) for gradient in gradients(both[0])}
    assert lying >= {"(Shard(dim=0),)", "(Partial(sum),)"}


def test_weight_gradients_join_the_sums_one_by_one(both: Both) -> None:
    """Rather than be held until all of a later microbatch are there."""
    mine, torchs = both
    for item in both:
        for part in item.parts:
            part.zero_grad()
        step(item, 3)
    with Products():  # torch 2.15 captures anew under a mode
        step(mine, 4)
    step(torchs, 4)
    earlier = gradients(mine)
    with Products() as products:
        step(mine, 5)
    step(torchs, 5)
    assert all(a is b for a, b in zip(earlier, gradients(mine), strict=True))
    assert len(products.made) >= 4 * 2 * STAGES
    weights = sum(parameter.ndim == 2 for part in mine.parts for parameter in part.parameters())
    assert products.most <= weights + 1


def test_gradient_that_lies_otherwise_is_added_to_as_autograd_does(
    both: Both,
) -> None:
    """Somebody has reduced it in between."""
    for item in both:
        for part in item.parts:
            for parameter in part.parameters():
                lying = parameter.placements
                parameter.grad = parameter.grad.redistribute(placements=lying)
        step(item, 6)
    assert_alike(both)
