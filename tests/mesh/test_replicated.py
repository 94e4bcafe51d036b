"""Pipelines with replicas, over four Gloo processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autosplit.trainer import tuning
from tests.kept_ranks import ranks
from tests.mesh.workers import (
    REFERENCE,
    ROWS,
    WIDTH,
    M,
    assert_refused,
    assert_round_trip,
    assert_skipped,
    assert_step,
    block,
    by_hand,
    gradients_of,
    mesh_of,
    of_shares,
    share,
    trainer,
)
from tests.zoo import Made

MESH = {"pp": 2, "dp_replicate": 2}
TURNED = {"dp_replicate": 2, "pp": 2}


def own_share(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    return share(mesh.get_local_rank("dp_replicate"))


@ranks(4)
@pytest.mark.parametrize(
    ("sizes", "stages", "options"),
    [
        (MESH, 2, {}),
        (TURNED, 2, {"split_backward": False, **REFERENCE}),
        (MESH, 4, {"schedule": "zb-v", **REFERENCE}),
    ],
)
def test_a_step_is_that_of_one_process(
    sizes: dict[str, int], stages: int, options: dict[str, Any]
) -> None:
    """Bit for bit, which averages the shares of two."""
    mesh = mesh_of(**sizes)
    losses, *rest = by_hand(block, stages, 2)
    with trainer(mesh, stages=stages, max_grad_norm=1e9, **options) as engine:
        expected = losses[mesh.get_local_rank("dp_replicate")], *rest
        assert_step(engine, own_share(mesh), expected)
        report = engine.verify(own_share(mesh))
        assert (report.plain, report.bits_equal) == (True, True)


@ranks(4)
def test_replicas_of_one_stage_after_another() -> None:
    """Of four, whose gradients are added in some order; and of a whole model that is cut."""
    mesh, inputs = mesh_of(dp_replicate=4), {"max_grad_norm": 1e9}
    losses, *rest = by_hand(block, 2, 4)
    with trainer(mesh, **inputs, **REFERENCE) as engine:
        expected = losses[dist.get_rank()], *rest
        assert_step(engine, own_share(mesh), expected, exact=lambda _: False)
    mesh, model = mesh_of(**MESH), nn.Sequential(*(block(index) for index in range(2)))
    options = {"example": torch.zeros(ROWS // M, WIDTH), "planning": {"costs": "estimate"}}
    with trainer(mesh, model, **options) as engine:
        seen = engine.forward_backward(own_share(mesh))
    assert seen.tolist() == by_hand(block, 2, 2)[0][mesh.get_local_rank("dp_replicate")]


@contextlib.contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """The bytes of each all-reduce of gradients that starts inside."""
    results: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float32 and tensor.numel() > 1:  # not losses, norms, meetings
            results.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield results


WEIGHT, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH


@ranks(4)
def test_gradients_are_reduced_once_a_step() -> None:
    mesh = mesh_of(**MESH)
    with trainer(mesh, nonfinite="skip", **REFERENCE) as engine:
        engine.step(own_share(mesh))
        assert_skipped(engine, own_share(mesh), bad=mesh.get_local_rank("dp_replicate") == 0)
        with counted_reductions() as reductions:
            engine.step(own_share(mesh))
            engine.step(own_share(mesh))
    # Beside the gradients goes a number for each parameter.
    assert reductions == [2 * WEIGHT + 2 * BIAS + 16] * 2


class Counting(nn.Module):
    """A block with buffers that each forward writes, by a batch norm without autograd's count."""

    seen: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = block(index)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x)
        self.seen.copy_(output.detach().sum())
        return nn.functional.batch_norm(output, self.mean, self.variance, training=self.training)


def everywhere(value: Any) -> list[Any]:
    results: list[Any] = [None] * 4
    dist.all_gather_object(results, value)
    return results


@ranks(4)
def test_replicas_start_with_one_model_and_keep_its_buffers() -> None:
    mesh = mesh_of(**MESH)
    replica = mesh.get_local_rank("dp_replicate")
    with trainer(mesh, lambda index: Counting(index + 10 * replica), **REFERENCE) as engine:
        engine.step(own_share(mesh))
        losses = everywhere(engine.evaluate(own_share(mesh)).tolist())
        assert engine.mesh is mesh
        assert engine.rank == mesh.get_local_rank("pp")
        (values,) = engine.state_dict().values()
    rows = everywhere(torch.cat([value.flatten() for value in values.values()]))
    places = mesh.mesh.tolist()
    one, other = places[engine.rank]
    assert torch.equal(rows[one], rows[other])
    assert losses[places[0][0]] != losses[places[0][1]]
    assert all(losses[a] == losses[b] for a, b in zip(*places, strict=True))


@ranks(4)
def test_replicas_agree_on_schedules_memory_and_timelines() -> None:
    """One schedule, other shapes of batches, the memory of a pipeline, and a timeline."""
    mesh = mesh_of(**MESH)
    local = own_share(mesh)
    searched = mock.Mock(wraps=tuning.search)
    with (
        mock.patch.object(tuning, "search", searched),
        trainer(mesh, schedule="auto", **REFERENCE) as engine,
    ):
        for _ in range(4):
            engine.step(local)
        first, *remaining = everywhere(engine.schedule.ranks)
    collectives = searched.call_args.args[0].collectives
    assert [(part.gather, part.reduction > 0.0) for part in collectives] == [(0.0, True)] * 2
    assert everywhere(collectives) == [collectives] * 4
    assert remaining == [first] * 3
    with trainer(mesh, record="memory", **REFERENCE) as engine:
        engine.step(local)
        engine.step(tuple(tensor[:4] for tensor in local))
        assert len(engine.memory().bands) == 2
        assert {span.rank for span in engine.timeline().spans} == {0, 1}


def tied(index: int) -> Any:
    """A block with the parameter that all stages share."""
    local = block(index)
    torch.manual_seed(7)
    return Made(
        lambda m, x: m.block(x) * m.tied, block=local, tied=nn.Parameter(torch.randn(WIDTH))
    )


@ranks(4)
def test_copies_of_parameters_within_a_pipeline() -> None:
    """Near one process, and the same bits wherever a parameter is."""
    mesh, model = mesh_of(**MESH), nn.Sequential(tied(0), tied(1))
    model[1].tied = model[0].tied
    losses, gradients, norm = of_shares(model, map(share, range(2)), F.mse_loss)
    expected = losses[mesh.get_local_rank("dp_replicate")], gradients, norm
    gradients["1.tied"] = gradients["0.tied"]
    options = {"shared_parameters": [((0, "tied"), (1, "tied"))], **REFERENCE}
    with trainer(mesh, tied, max_grad_norm=1e9, **options) as engine:
        assert_step(engine, own_share(mesh), expected, exact=lambda _: False)
        mine = gradients_of(engine)
        for other in everywhere(mine):
            assert all(torch.equal(mine[name], other[name]) for name in mine.keys() & other.keys())


@ranks(4)
def test_checkpoints() -> None:
    """They are taken up by the same mesh bit for bit, by a pipeline of four, and in one process."""
    mesh, line = mesh_of(**MESH), mesh_of(pp=4)
    assert_round_trip(
        lambda: trainer(mesh, stages=4, schedule="interleaved", **REFERENCE),
        lambda: trainer(stages=4, ranks=1, **REFERENCE),
        lambda step: share(mesh.get_local_rank("dp_replicate"), step),
        line=lambda: trainer(line, stages=4, **REFERENCE),
    )


KNOWN = "'pp' (the stages of one pipeline), 'dp_replicate' (replicas of it, each with its own share"


@ranks(4)
def test_refusals() -> None:
    mesh, turned = mesh_of(**MESH), mesh_of(**TURNED)
    named, rank = mesh_of(pp=2, tp=2), dist.get_rank()
    local = own_share(mesh)
    half = tuple(tensor[:4] for tensor in local) if mesh.get_local_rank("dp_replicate") else local

    def built(made: Any, **options: Any) -> Any:
        return lambda: trainer(made, **REFERENCE, **options)

    def ran(batch: Any, build: Any = block, **options: Any) -> Any:
        def act() -> None:
            with trainer(mesh, build, **REFERENCE, **options) as engine:
                engine.step(batch)

        return act

    shapes = "inputs is float32[8, 6] on rank 0 and float32[4, 6] on rank 1; pass"
    assert_refused(
        [
            (
                f"mesh dimension 'dp' is not supported; supported: {KNOWN}",
                built(mesh_of(pp=2, dp=2)),
            ),
            (
                "the dimensions of the mesh of (2, 2) ranks have no names: create it by",
                built(init_device_mesh("cpu", (2, 2))),
            ),
            (
                "2 ranks along 'tp', and no parameter of any stage is sharded over them",
                built(named),
            ),
            (
                "the mesh (pp=2) has 2 ranks, [0, 1], but the process group has 4 ranks, 0 to 3",
                built(DeviceMesh("cpu", [0, 1], mesh_dim_names=("pp",))),
            ),
            (
                "mesh must be a DeviceMesh of torch.distributed.device_mesh; got a str",
                built("pp=2"),
            ),
            (
                "ranks=2 has no effect together with mesh, which defines",
                built(mesh, ranks=2),
            ),
            (
                "but the layout of pipelines in the mesh is ((0, 2), (1, 3))",
                built(mesh if rank < 2 else turned),
            ),
            (
                "but the layout of pipelines in the mesh is ((0, 2), (1, 3)) at the places",
                built(mesh if rank < 2 else named),
            ),
            (
                "the mesh has 4 ranks along 'pp' for 2 stages: each rank needs at least one",
                built(mesh_of(pp=4)),
            ),
            (f"{shapes} a replica's share", ran(half, memory_limit="1GiB")),
            (f"{shapes} a replica's share", ran(half)),
            (
                "the ranks 2 and 3 hold replicas of the same stages, which must be built",
                ran(local, lambda index: nn.Linear(WIDTH, WIDTH, bias=rank != 3)),
            ),
        ]
    )
