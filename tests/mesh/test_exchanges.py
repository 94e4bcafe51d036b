"""Stages whose ranks exchange tokens of experts or parts of sequences, over Gloo processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from autosplit import CollectiveCosts, DeviceSpeed, Link
from autosplit.passes.analysis.operator_cost import graph_flops
from autosplit.pipeline.training import options as trainer_options
from autosplit.stage import Stage
from tests.all_true import assert_all
from tests.mesh.exchange_workers import Reference, built, stage_of
from tests.mesh.workers import REFERENCE, by_stage, refusal, round_trip, share, trainer
from tests.ranks import ranks

CLIPPED = {"max_grad_norm": 0.5}


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@ranks(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [("ep", {"schedule": "zb-h1", "memory": "lean"}), ("cp", {"memory": "lean"})],
)
def test_a_step_is_that_of_one_process(options: dict[str, Any], name: str) -> None:
    mesh = mesh_of(pp=2, **{name: 2})
    with trainer(mesh, built(mesh, name), 2, **options, **CLIPPED) as made:
        reference = Reference(name, (0, 1), [(0, 1)])
        reference.agrees(made, mesh.get_local_rank(name), exact=lambda _: True)


@ranks(4)
def test_all_is_sharded_along_ep_and_experts_are_not() -> None:
    mesh = mesh_of(pp=2, efsdp=1, ep=2)
    with trainer(mesh, built(mesh), 2, **CLIPPED) as made:
        reference = Reference("few", (0, 1), [(0, 1)])
        reference.agrees(made, mesh.get_local_rank("ep"), exact=lambda _: True)


@ranks(4)
@pytest.mark.parametrize(
    ("shards", "name", "ways"), [("efsdp", "ep", "few"), ("dp_shard", "cp", "cp")]
)
def test_all_is_sharded_along_both_and_experts_along_one(shards: str, name: str, ways: str) -> None:
    """Gradients of experts are sums of two, others' of four, in whichever order."""
    mesh = mesh_of(**{shards: 2, name: 2})
    own = 2 * mesh.get_local_rank(shards) + mesh.get_local_rank(name)
    with trainer(mesh, built(mesh), 1, **CLIPPED) as made:
        reference = Reference(ways, (0,), [(0, 1), (2, 3)])
        reference.agrees(made, own, exact=lambda each: ".experts." in each)


@ranks(4)
def test_what_collectives_take_is_measured() -> None:
    """By the slowest of all ranks' links: I computes what fits into its waits, W the rest."""
    mesh = mesh_of(pp=2, ep=2)

    def left(latency: float) -> int:
        """Floating-point operations of W."""

        def measured(ranks: DeviceMesh, *, dtype: torch.dtype) -> CollectiveCosts:
            assert ranks.size() == 2
            here = latency if dist.get_rank() == 0 else 0.0
            return CollectiveCosts(Link(here), DeviceSpeed(1e12, 1e12))

        with (
            patch.object(trainer_options, "measure_collectives", measured),
            trainer(mesh, built(mesh), 2, overlap=None) as made,
        ):
            made.step(share(mesh.get_local_rank("ep")))
            (stage,) = made.stages.values()
            assert isinstance(stage, Stage)
            weight = stage.functions.graphs.backward_weight
            return graph_flops(weight.graph) if weight is not None else 0

    slow, fast = left(1.0), left(0.0)
    assert slow < fast if mesh.get_local_rank("pp") else slow == fast  # the first stage has no I


@ranks(4)
def test_checkpoints_have_all_experts() -> None:
    """They are taken up by the same mesh and by one process."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    mesh = mesh_of(pp=2, ep=2)
    found = round_trip(
        lambda: trainer(mesh, built(mesh), 2, **CLIPPED, **REFERENCE),
        lambda: trainer(None, stage_of, 2, ranks=1, **CLIPPED, **REFERENCE),
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
        bias = module[0].bias.data
        bias = distribute_tensor(bias, mesh["ep"], [Replicate()], src_data_rank=None)
        module[0].bias = nn.Parameter(bias)
        return module

    def sharded(index: int) -> nn.Module:
        module = stage_of(index, mesh["ep"])
        fully_shard(module[0], mesh=mesh["ep"])
        return module

    def mixed(index: int) -> nn.Module:
        return fully_shard(stage_of(index, shards["ep"]), mesh=shards["efsdp"])

    assert "a mesh has not both 'ep' and 'tp'" in said(stage_of, mesh_of(ep=2, tp=2))
    assert "a mesh has not both 'ep' and 'cp'" in said(stage_of, mesh_of(ep=2, cp=2))
    assert "and 'dp_shard': call that of experts" in said(stage_of, mesh_of(ep=2, dp_shard=2))
    assert "of any stage is shared by them: let experts be parameters distribute" in said(stage_of)
    assert "0.bias is a DTensor of which each rank along 'ep' has a copy" in said(copied)
    assert "PipelineTrainer has no mesh with 'efsdp'" in said(sharded)
    assert "experts and others, which other ranks share" in said(mixed, shards)
