"""Stages whose ranks exchange tokens of experts or parts of sequences, over Gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.kept_ranks import ranks
from tests.mesh.exchange_models import built, stage_of
from tests.mesh.workers import (
    REFERENCE,
    assert_refused,
    assert_round_trip,
    assert_skipped,
    assert_step,
    mesh_of,
    norm_of,
    of_shares,
    place,
    share,
    trainer,
)

CLIPPED: dict[str, Any] = {"max_grad_norm": 0.5, "nonfinite": "skip"}


def assert_as_eager(mesh: DeviceMesh, ways: str, along: str, shards: str, **options: Any) -> None:
    """A step is that of the same modules in eager mode, each share's in one stage: losses, the
    means of all shares' gradients, and their norm. Sums of more than two are in some order.
    """
    stages, names = mesh["pp"].size() if "pp" in mesh.mesh_dim_names else 1, (shards, along)
    dimensions = [name for name in names if name in mesh.mesh_dim_names]
    model = nn.Sequential(*(stage_of(at, mesh[along], ways) for at in range(stages)))
    local = share(place(mesh, *dimensions))
    (losses,), gradients, _ = of_shares(model, [local], nn.functional.mse_loss)
    for name, gradient in gradients.items():
        for dimension in dimensions:
            if (
                dimension != along or ".experts." not in name
            ):  # an expert has the sum over all tokens
                dist.all_reduce(gradient, group=mesh.get_group(dimension))
            gradient /= mesh[dimension].size()
    expected = losses, gradients, norm_of(gradients.values())
    few = mesh.size() // stages == 2
    with trainer(mesh, built(mesh, ways), stages, **options, **CLIPPED) as engine:
        assert_step(engine, local, expected, exact=lambda name: few or ".experts." in name)
        assert_skipped(engine, local, bad=place(mesh, *dimensions) == 0)


@ranks(4)
@pytest.mark.parametrize(
    ("sizes", "ways", "options"),
    [
        ({"pp": 2, "ep": 2}, "ep", {"schedule": "zb-h1", "memory": "lean"}),
        ({"pp": 2, "cp": 2}, "cp", {"memory": "lean"}),
        ({"efsdp": 2, "ep": 2}, "few", {}),
    ],
    ids=["ep", "cp", "efsdp"],
)
def test_a_step_is_that_of_eager_mode(
    sizes: dict[str, int], ways: str, options: dict[str, Any]
) -> None:
    """All is sharded along both dimensions, where there are two, and experts along one."""
    along = "cp" if "cp" in sizes else "ep"
    shards = "dp_shard" if along == "cp" else "efsdp"
    assert_as_eager(mesh_of(**sizes), ways, along, shards, **options)


@ranks(2)
@pytest.mark.parametrize(
    ("sizes", "ways"), [({"efsdp": 1, "ep": 2}, "few"), ({"dp_shard": 1, "cp": 2}, "cp")]
)
def test_a_step_with_one_rank_along_the_shards(sizes: dict[str, int], ways: str) -> None:
    """What is no expert is sharded over both ranks."""
    shards, along = sizes
    assert_as_eager(mesh_of(**sizes), ways, along, shards)


@ranks(4)
def test_checkpoints_have_all_experts() -> None:
    """They are taken up by the same mesh and by one process."""
    mesh = mesh_of(pp=2, ep=2)
    assert_round_trip(
        lambda: trainer(mesh, built(mesh), 2, **CLIPPED, **REFERENCE),
        lambda: trainer(None, stage_of, 2, ranks=1, **CLIPPED, **REFERENCE),
        lambda step: share(mesh.get_local_rank("ep"), step),
    )


@ranks(4)
def test_refusals() -> None:
    mesh, shards = mesh_of(pp=2, ep=2), mesh_of(pp=2, efsdp=1, ep=2)

    def given(build: Any, over: DeviceMesh = mesh) -> Any:
        return lambda: trainer(over, build, 2)

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

    assert_refused(
        [
            ("'ep' and 'tp' cannot be combined", given(stage_of, mesh_of(ep=2, tp=2))),
            ("'ep' and 'cp' cannot be combined", given(stage_of, mesh_of(ep=2, cp=2))),
            ("got ep, dp_shard: call that of experts", given(stage_of, mesh_of(ep=2, dp_shard=2))),
            (
                "of any stage is sharded over them: make experts' parameters by distribute",
                given(stage_of),
            ),
            ("0.bias is a DTensor of which each rank along 'ep' has a copy", given(copied)),
            ("PipelineTrainer has no mesh with 'efsdp'", given(sharded)),
            (
                "mix experts and other parameters, which are sharded over different ranks",
                given(mixed, shards),
            ),
        ]
    )
