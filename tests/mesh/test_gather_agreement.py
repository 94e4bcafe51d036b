"""Ranks along dp_shard that call different blocks, over four Gloo processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from autosplit.errors import BatchError
from tests.kept_ranks import ranks
from tests.mesh.workers import WIDTH, mesh_of, number_of, trainer, whole

MESH = {"pp": 2, "dp_shard": 2}


class Branching(nn.Module):
    """Blocks, of which microbatches of more than two samples and ``skips`` leave some out."""

    def __init__(self, least: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        self.layers, self.least, self.skips = nn.ModuleList(layers), least, False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.skips and number == 1:
                continue
            if len(x) <= 2 or number < self.least:
                x = layer(x)
        return x


def branching(index: int) -> Branching:
    torch.manual_seed(index)
    return Branching(index + 1)


def sharded(mesh: DeviceMesh) -> Any:
    def stage(index: int) -> nn.Module:
        module: Any = branching(index)
        for layer in module.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        built: nn.Module = fully_shard(module, mesh=mesh["dp_shard"], reshard_after_forward=True)
        return built

    return stage


def pairs_of(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [tuple(torch.randn(2, size, WIDTH, generator=generator)) for size in sizes]  # type: ignore[misc]


def expected(
    stages: int, sizes: list[list[int]], skips: list[bool]
) -> tuple[list[Any], dict[str, Tensor]]:
    """The losses of each share and the mean gradients, computed by autograd."""
    model, losses = nn.Sequential(*map(branching, range(stages))), []
    sums: dict[str, Tensor] = {}
    for share, skipping in zip(sizes, skips, strict=True):
        model.zero_grad()
        model[0].skips = skipping  # type: ignore[assignment]
        losses.append([])
        for x, y in pairs_of(share):
            loss = F.mse_loss(model(x), y)
            (loss / len(share)).backward()
            losses[-1].append(loss.item())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad / len(sizes)
    return losses, sums


def assert_trained(engine: Any, sizes: list[list[int]], skips: list[bool]) -> None:
    """Steps and evaluations are those of one process."""
    number = number_of(engine.mesh)
    losses, gradients = expected(len(engine.schedule.placement), sizes, skips)
    for module in engine.modules.values():
        module.skips = skips[number] and 0 in engine.modules
    engine.optimizer.zero_grad()
    local = pairs_of(sizes[number])
    assert engine.forward_backward(microbatches=local).tolist() == losses[number]
    for stage, module in engine.modules.items():
        for name, parameter in module.named_parameters():
            actual = None if parameter.grad is None else whole(parameter.grad)
            wanted = gradients.get(f"{stage}.{name}")
            assert (actual is None) == (wanted is None), name
            assert actual is None or torch.equal(actual, wanted), name
    assert engine.evaluate(microbatches=local).tolist() == losses[number]


@ranks(4)
def test_ranks_that_call_other_blocks() -> None:
    mesh = mesh_of(**MESH)
    with trainer(mesh, sharded(mesh)) as engine:
        for sizes, skips in [
            ([[2, 2], [2, 2]], [False, False]),
            ([[2, 3], [3, 2]], [False, False]),
            ([[3, 3], [2, 2]], [False, False]),
            ([[2, 2], [2, 2]], [False, True]),
            ([[2, 2], [2, 2]], [True, True]),
            ([[3, 3], [3, 3]], [False, False]),
            ([[2, 2], [2, 2]], [False, False]),
        ]:
            assert_trained(engine, sizes, skips)


@ranks(2)
def test_ranks_that_call_other_blocks_in_whole_backwards() -> None:
    mesh = mesh_of(dp_shard=2)
    with trainer(mesh, sharded(mesh), 1, split_backward=False) as engine:
        for sizes in ([[2, 2], [2, 2]], [[2, 3], [3, 2]], [[3, 3], [2, 2]]):
            assert_trained(engine, sizes, [False, False])


@ranks(4)
def test_a_list_that_one_rank_refuses() -> None:
    """No rank waits for parameters that another does not gather; the next step may follow."""
    mesh, refusals = mesh_of(**MESH), list[str]()
    with trainer(mesh, sharded(mesh), timeout=20.0) as engine:
        for wrong in (number_of(mesh), 0, number_of(mesh), 0):
            x, y = torch.randn(2, WIDTH + wrong), torch.randn(2, WIDTH)
            refusal = ""
            try:
                engine.step(microbatches=[(x, y)])
            except BatchError as error:
                refusal = str(error)
            refusals.append(refusal.partition(",")[0])
    assert refusals == ["microbatch 0 does not fit stage 0: stage 0 cannot take its inputs", ""] * 2
