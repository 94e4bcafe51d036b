from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autosplit
from autosplit import Stage
from autosplit.errors import CaptureError, ShardedError, SplitError
from tests.fake_ranks import fake_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh((2, 2), ("pp", "tp")) as found:
        yield found


def lying(mesh: DeviceMesh, placement: Placement, rows: int = 4) -> nn.Linear:
    """A layer whose weight is a DTensor."""
    layer = nn.Linear(4, rows, bias=False)
    local = torch.randn(rows, 4)[: rows if not placement.is_shard() else rows - rows // 2]
    shape, stride = torch.Size((rows, 4)), (4, 1)
    whole = DTensor.from_local(local, mesh, [placement], shape=shape, stride=stride)
    layer.weight = nn.Parameter(whole)
    return layer


def test_parameter_that_is_a_sum(mesh: DeviceMesh) -> None:
    with pytest.raises(ShardedError, match=r"weight is a DTensor .*parts of a sum.*tp: P.*redis"):
        autosplit.split(lying(mesh["tp"], Partial()), torch.randn(2, 4))


def test_uneven_shards(mesh: DeviceMesh) -> None:
    with pytest.raises(ShardedError, match=r"weight has 5 elements .* 2 ranks .* multiple of 2"):
        autosplit.split(lying(mesh["tp"], Shard(0), 5), torch.randn(2, 4))


def test_sharded_over_the_pipeline(mesh: DeviceMesh) -> None:
    layer = lying(mesh["pp"], Shard(0))
    with pytest.raises(ShardedError, match=r"weight is sharded over 'pp' .*mesh\['tp'\]"):
        Stage(layer, [torch.randn(2, 4)])


def test_stage_that_returns_a_dtensor(mesh: DeviceMesh) -> None:
    plan = ColwiseParallel(use_local_output=False)
    layer = parallelize_module(nn.Linear(4, 4), mesh["tp"], plan)
    with pytest.raises(CaptureError, match=r"returns output, a DTensor .*use_local_output=True"):
        Stage(layer, [torch.randn(2, 4)])


def test_unknown_overlap() -> None:
    with pytest.raises(
        SplitError, match="unknown overlap 'all'; known ones: 'collectives', 'none'"
    ):
        autosplit.split(nn.Linear(2, 2), overlap="all")
