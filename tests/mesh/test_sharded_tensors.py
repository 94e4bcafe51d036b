"""Pipelines whose stages are sharded and share tensors with other ranks, over Gloo processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import autosplit
from autosplit.errors import AutosplitError, PipelineError
from tests.kept_ranks import Ranks, ranks
from tests.mesh.parallel_models import (
    WIDTH,
    Block,
    Build,
    batch,
    loss_of,
    named,
    of_words,
    parallel,
    stage_of,
    still,
)
from tests.mesh.workers import (
    REFERENCE,
    M,
    assert_refused,
    assert_round_trip,
    assert_step,
    mesh_of,
    of_shares,
    place,
    whole,
)
from tests.zoo import Made

MESH = {"dp_shard": 2, "tp": 2}


def sharded(mesh: DeviceMesh, build: Build, **options: Any) -> Build:
    """Shard each block as a group, and the remaining parameters as another."""

    def stage(index: int) -> nn.Module:
        module = build(index)
        for part in module:
            if isinstance(part, Block):
                fully_shard(part, mesh=mesh["dp_shard"], **options)
        built: nn.Module = fully_shard(module, mesh=mesh["dp_shard"], **options)
        return built

    return stage


def norms_apart(mesh: DeviceMesh) -> Build:
    """A stage with norms that the plan does not name, of which each rank has a copy, and other
    values on each rank but the first.
    """

    def build(index: int) -> nn.Module:
        module = stage_of(index, 1, 1).eval()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for part in module:
            if isinstance(part, Block):
                parallelize_module(part, mesh["tp"], plan)
                with torch.no_grad():
                    part.norm.bias.add_(mesh.get_local_rank("tp"))
        return module

    return build


def own_batch(mesh: DeviceMesh, step: int = 0) -> tuple[Tensor, Tensor]:
    return batch(mesh.get_local_rank("dp_shard"), step)


@ranks(4)
def test_a_step_is_that_of_eager_mode() -> None:
    """Bit for bit the means over shares."""
    mesh = mesh_of(**MESH)
    build = still(parallel(mesh, 1, 1))
    with loss_parallel():
        losses, *rest = of_shares(build(0), map(batch, range(2)), loss_of)
        with of_words(mesh, 1, sharded(mesh, build), memory="lean") as engine:
            expected = losses[mesh.get_local_rank("dp_shard")], *rest
            assert_step(engine, own_batch(mesh), expected, named(1, 1))


@ranks(4)
def test_a_split_module_trains_as_fsdp2_of_it_unsplit() -> None:
    mesh = mesh_of(**MESH)
    results = []
    for wrap in (lambda model: model, autosplit.split):
        plain = sharded(mesh, still(parallel(mesh, 1, 1)))(0)
        model: Any = wrap(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        seen = []
        for step in range(2):
            inputs = own_batch(mesh, step)
            for number, (x, y) in enumerate(zip(*(e.chunk(M) for e in inputs), strict=True)):
                plain.set_requires_gradient_sync(model is not plain or number == M - 1)
                with loss_parallel():
                    loss_of(model(x), y).backward()
            assert all(isinstance(p.grad, DTensor) for p in model.parameters())  # pending ones, too
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen += [norm, *model.parameters()]
        results.append([whole(tensor.detach()) for tensor in seen])
    assert all(map(torch.equal, *results))


@ranks(4)
def test_checkpoints() -> None:
    """They have whole tensors, and are taken up by this mesh and by one process."""
    mesh = mesh_of(**MESH)
    build = sharded(mesh, norms_apart(mesh))
    assert_round_trip(
        lambda: of_words(mesh, 1, build, max_grad_norm=0.5),
        lambda: of_words(None, 1, lambda index: stage_of(index, 1, 1), ranks=1, **REFERENCE),
        lambda step: own_batch(mesh, step),
        named(1),
    )


@ranks(4)
def test_refusals() -> None:
    mesh, turned, line = mesh_of(**MESH), mesh_of(tp=2, dp_shard=2), mesh_of(dp_shard=4, tp=1)

    def elsewhere(index: int) -> nn.Module:
        """Ranks share tensors along dp_shard, and shards lie along tp."""
        module: nn.Module = fully_shard(norms_apart(turned)(index), mesh=turned["dp_shard"])
        return module

    fewer = sharded(line, norms_apart(line), reshard_after_forward=2)
    some = mesh if dist.get_rank() % 2 else None
    assert_refused(
        [
            ("along the trainer's mesh these ranks are [", lambda: of_words(mesh, 1, elsewhere)),
            ("torch does not reshard to fewer ranks", lambda: of_words(line, 1, fewer)),
            (
                "the same trainer, but the layout of pipelines in the mesh is",
                lambda: of_words(some, 4, lambda index: stage_of(index, 4)),
            ),
        ]
    )


# --- blocks that no dimension divides, also in three dimensions on eight ranks ----------------


_to_live = 0
"""How many calls this process has left, where it is to be killed."""


@torch.library.custom_op("autosplit_tests::weather", mutates_args=())
def weather(x: Tensor) -> Tensor:
    global _to_live
    _to_live -= 1
    if _to_live == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


weather.register_fake(torch.empty_like)
weather.register_autograd(lambda ctx, grad: grad)


def block() -> nn.Module:
    """Neither what a rank has along tp nor what it has the whole of can be sharded evenly."""
    return Made(
        lambda m, x: x + m.down(weather(m.up(x))) + m.mix(x)[..., 1:],
        up=nn.Linear(WIDTH, 6),
        down=nn.Linear(6, WIDTH),
        mix=nn.Linear(WIDTH, WIDTH + 1),
    )


def odd(mesh: DeviceMesh, stages: int, count: int = 2) -> Callable[[int], Any]:
    """Stages of so many such blocks; sharded, where the mesh has a dimension for that."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def build(index: int) -> Any:
        parts = []
        for number in range(index * count // stages, (index + 1) * count // stages):
            torch.manual_seed(number)
            parts.append(parallelize_module(block(), mesh["tp"], plan))
        module = nn.Sequential(*parts)
        if stages == 1 or "dp_shard" not in (mesh.mesh_dim_names or ()):
            return module
        fully_shard(module[0], mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    return build


def mean_square(y: Tensor, _: Tensor) -> Tensor:
    return y.square().mean()


@ranks(4)
def test_replicas_whose_ranks_share_tensors() -> None:
    mesh = mesh_of(dp_replicate=2, tp=2)
    local = place(mesh, "dp_replicate")
    losses, *rest = of_shares(odd(mesh, 1, 1)(0), map(batch, range(2)), mean_square)
    with of_words(mesh, 1, odd(mesh, 1, 1), loss_fn=mean_square) as engine:
        assert_step(engine, batch(local), (losses[local], *rest), named(1, 1))


def eight_ranks(folder: Path) -> None:
    """A step is that of eager mode; then rank 5 is killed in the second microbatch of another,
    and the others leave what they see of that in a folder.
    """
    global _to_live
    rank, rows = dist.get_rank(), set()
    mesh = mesh_of(pp=2, dp_shard=2, tp=2)
    local = place(mesh, "dp_shard")
    try:
        losses, *rest = of_shares(odd(mesh, 1)(0), map(batch, range(2)), mean_square)
        with of_words(mesh, 2, odd(mesh, 2), loss_fn=mean_square) as engine:
            assert_step(engine, batch(local), (losses[local], *rest), named(2))
            for module in engine.modules.values():
                rows |= {p.to_local().shape[0] for p in module.parameters()}
            assert rows == ({2, 3} if local == 0 else {1, 2})
            _to_live = 2 if rank == 5 else 0
            engine.step(batch(local))
    except AutosplitError as error:
        (folder / str(rank)).write_text(str(error))
        raise


def test_a_killed_rank_ends_all(on_ranks: Ranks, tmp_path: Path) -> None:
    """Ranks of its pipeline, of its tensor shards and of its FSDP shards all end."""
    with pytest.raises(PipelineError, match="rank 5"):
        on_ranks(eight_ranks, 8, (tmp_path,), timeout=200)
    how = ("rank 5 was killed by SIGKILL", "rank 5 ended without a word")  # once it is reaped
    message = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert sorted(message) == [*"0123467"]
    assert all(item.startswith(how) for item in message.values()), message
