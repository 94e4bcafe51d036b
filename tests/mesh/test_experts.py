"""Experts that are spread over ranks, in pipelines over Gloo processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.all_true import assert_all
from tests.mesh.expert_workers import Reference, built, stage_of
from tests.mesh.workers import by_stage, refusal, round_trip, share, trainer
from tests.ranks import ranks

CLIPPED = {"max_grad_norm": 0.5}


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@ranks(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "zb-h1", "memory": "lean"}],
    ids=["1f1b", "other"],
)
def test_a_step_is_that_of_one_process(options: dict[str, Any]) -> None:
    mesh = mesh_of(pp=2, ep=2)
    with trainer(mesh, built(mesh), 2, **options, **CLIPPED) as made:
        Reference((0, 1), [(0, 1)]).agrees(made, mesh.get_local_rank("ep"), exact=lambda _: True)


@ranks(4)
def test_all_is_sharded_along_ep_and_experts_are_not() -> None:
    mesh = mesh_of(pp=2, efsdp=1, ep=2)
    with trainer(mesh, built(mesh), 2, **CLIPPED) as made:
        Reference((0, 1), [(0, 1)]).agrees(made, mesh.get_local_rank("ep"), exact=lambda _: True)


@ranks(4)
def test_experts_are_sharded_along_what_is_left() -> None:
    """Their gradients are sums of two, others' of four, in whichever order."""
    mesh = mesh_of(efsdp=2, ep=2)
    own = 2 * mesh.get_local_rank("efsdp") + mesh.get_local_rank("ep")
    with trainer(mesh, built(mesh), 1, **CLIPPED) as made:
        reference = Reference((0,), [(0, 1), (2, 3)])
        reference.agrees(made, own, exact=lambda name: ".experts." in name)


@ranks(4)
def test_checkpoints_have_all_experts() -> None:
    """They are taken up by the same mesh and by one process."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    mesh = mesh_of(pp=2, ep=2)
    found = round_trip(
        lambda: trainer(mesh, built(mesh), 2, **CLIPPED),
        lambda: trainer(None, stage_of, 2, ranks=1, **CLIPPED),
        lambda step: share(mesh.get_local_rank("ep"), step),
        Path(folder[0]),
        by_stage,
    )
    assert_all(found)


@ranks(4)
def test_what_is_refused() -> None:
    mesh, shards = mesh_of(pp=2, ep=2), mesh_of(pp=2, efsdp=1, ep=2)

    def said(build: Any, over: DeviceMesh = mesh) -> str:
        return refusal(lambda: trainer(over, build, 2))

    def copied(index: int) -> nn.Module:
        module = stage_of(index, mesh["ep"])
        bias = distribute_tensor(module[0].bias.data, mesh["ep"], [Replicate()])
        module[0].bias = nn.Parameter(bias)
        return module

    def sharded(index: int) -> nn.Module:
        module = stage_of(index, mesh["ep"])
        fully_shard(module[0], mesh=mesh["ep"])
        return module

    def mixed(index: int) -> nn.Module:
        return fully_shard(stage_of(index, shards["ep"]), mesh=shards["efsdp"])

    assert "a mesh has not both 'ep' and 'tp'" in said(stage_of, mesh_of(ep=2, tp=2))
    assert "and 'dp_shard': call that of experts" in said(stage_of, mesh_of(ep=2, dp_shard=2))
    assert "of any stage is shared by them: let experts be parameters distribute" in said(stage_of)
    assert "0.bias is a DTensor of which each rank along 'ep' has a copy" in said(copied)
    assert "PipelineTrainer has no mesh with 'efsdp'" in said(sharded)
    assert "experts and others, which other ranks share" in said(mixed, shards)
