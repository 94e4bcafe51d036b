"""Pipelines whose stages share tensors with other ranks, over four Gloo processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from autosplit.checkpoint import read_checkpoint
from tests.kept_ranks import Ranks, forget_meshes, ranks
from tests.mesh.parallel_models import (
    WIDTH,
    WORDS,
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
    assert_round_trip,
    assert_step,
    common_folder,
    mesh_of,
    of_shares,
    refusal,
    same,
    whole,
)


@ranks(4)
@pytest.mark.parametrize(
    ("sizes", "stages", "options"),
    [
        ({"pp": 2, "tp": 2}, 2, {"memory": 500, "weights": "2bp"}),
        ({"tp": 2, "pp": 2}, 4, {"schedule": "zb-v", "memory": "lean"}),
    ],
)
def test_a_step_is_that_of_eager_mode(
    sizes: dict[str, int], stages: int, options: dict[str, Any]
) -> None:
    """Bit for bit, with the tensors shared alike, in one stage; and a part of a parameter on one
    rank that is no number is seen by all.
    """
    mesh = mesh_of(**sizes)
    model = still(parallel(mesh, 1, stages))(0)
    build = still(parallel(mesh, stages, stages))
    with loss_parallel(), of_words(mesh, stages, build, nonfinite="skip", **options) as engine:
        (losses,), *rest = of_shares(model, [batch()], loss_of)
        assert_step(engine, batch(), (losses, *rest), named(stages, stages))
        if stages == 2:
            if dist.get_rank() == 3:
                weight: Any = engine.modules[1].get_parameter("0.up.weight")
                with torch.no_grad():
                    weight.to_local()[0, 0] = math.nan
            assert engine.step(batch()).isnan().all()
            assert str(engine.grad_norm) == "nan"
            assert engine.metrics()["skipped"] == 1


@ranks(2)
def test_checkpoints() -> None:
    """They have whole tensors, and are taken up by this mesh, one process, and torch's loader; they
    are written while the next step runs. Those of torch's, of which ranks write parts, are read.
    """
    mesh = mesh_of(tp=2)
    build = parallel(mesh, 1, 1)
    with loss_parallel():
        path = assert_round_trip(
            lambda: of_words(mesh, 1, build, max_grad_norm=0.5),
            lambda: of_words(None, 1, lambda index: stage_of(index, 1, 1), ranks=1, **REFERENCE),
            lambda step: batch(0, step),
            lambda stage, name: name,
            asynchronous=True,
        )
    torchs = {"model": build(0).state_dict()}
    load(torchs, checkpoint_id=path, process_group=mesh.get_group("tp"))
    loaded = {name: whole(item) for name, item in torchs["model"].items()}
    assert same(loaded, read_checkpoint(path))
    folder = common_folder()
    save(torchs, checkpoint_id=folder)
    assert same(loaded, read_checkpoint(folder))


def new_mesh(second: str = "tp") -> DeviceMesh:
    forget_meshes()  # waits on the groups of one may have ended
    return mesh_of(**{"pp": 2, second: 2})


@ranks(4)
def test_refusals() -> None:
    """Bad stages and batches."""
    rank = dist.get_rank()

    def said(build: Any, given: Any = new_mesh, batches: int = 1, **options: Any) -> str:
        mesh = new_mesh()  # a trainer that ends takes the waits on its mesh with it

        def act() -> None:
            whose = mesh if given is new_mesh else given()
            with loss_parallel(), of_words(whose, 2, build(mesh), **options) as engine:
                engine.step(batch(rank % batches))

        return refusal(act)

    def ours(mesh: DeviceMesh) -> Build:
        return parallel(mesh, 2)

    def widened(mesh: DeviceMesh) -> Build:
        wider = nn.Linear(WIDTH, WIDTH, bias=rank % 2 == 0)
        return lambda index: nn.Sequential(wider, parallel(mesh, 2)(index))

    def ending(last: nn.Module) -> Any:
        """Ends in something that all ranks do on the whole."""

        def build(mesh: DeviceMesh, index: int) -> nn.Module:
            layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS if index else WIDTH)
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            torch.manual_seed(rank)
            return parallelize_module(nn.Sequential(*layers, last), mesh["tp"], plan)

        return lambda mesh: lambda index: build(mesh, index)

    def over_pipeline(mesh: DeviceMesh) -> Build:
        plan = {"0.up": ColwiseParallel()}
        return lambda index: parallelize_module(stage_of(index, 2), mesh["pp"], plan)

    def handed_on(mesh: DeviceMesh) -> Build:
        plan = {"1": ColwiseParallel(use_local_output=False)}
        return lambda index: parallelize_module(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)), mesh["tp"], plan
        )

    for result, *texts in (
        (
            said(over_pipeline),
            "is a DTensor over the ranks",
            "call parallelize_module(stage, mesh['tp'], plan) for each stage,",
        ),
        (
            said(ours, lambda: new_mesh("dp_replicate")),
            "is a DTensor over the ranks",
            "the trainer has no mesh with 'tp' or 'ep': call parallelize_mod",
        ),
        (
            said(lambda mesh: lambda index: stage_of(index, 2)),
            "the mesh has 2 ranks along 'tp', and no parameter of any stage is sharded",
        ),
        (said(widened), "hold parts of the same stages, which must be built alike"),
        (
            said(ours, memory="lean" if rank % 2 else "fast"),
            "every rank must build the same trainer, but memory is 'fast' on rank 0 and",
        ),
        (
            said(ours, batches=2, **REFERENCE),
            "share the tensors of their stages and got different batches: pass the same batch ",
        ),
        (
            said(ending(nn.LeakyReLU(rank % 2)), **REFERENCE),
            "share the tensors of a stage and have the losses",
            "the same batch on all ranks along 'tp', and compute the loss from whole outputs",
        ),
        (said(ending(nn.Dropout(0.5))), "accepted"),  # seeded apart, ranks drop alike
        (said(handed_on), "returns output, a DTensor", "use_local_output=True"),
    ):
        assert all(text in result for text in texts), result


class Weather(nn.Module):
    """A block that is bad in what the stage does with its second microbatch."""

    def __init__(self, block: nn.Module, act: Callable[[], None]) -> None:
        super().__init__()
        self.block = block
        self._act, self._calls = act, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Weather:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 3:  # building the stage runs the module once
            self._act()
        output: Tensor = self.block(x)
        return output


def fail() -> None:
    if dist.get_rank() == 3:
        raise ValueError("bad weather")


def failing() -> str:
    """Return the error of a step in which a rank fails. Torch shares groups between meshes of the
    same ranks, so these processes cannot use theirs any more.
    """
    mesh = new_mesh()

    def build(index: int) -> nn.Module:
        module = parallel(mesh, 2)(index)
        module[0].up = Weather(module[0].up, fail)
        return module

    def act() -> None:
        with loss_parallel(), of_words(mesh, 2, build, **REFERENCE) as engine:
            engine.step(batch())

    return refusal(act)


def test_a_rank_that_fails_ends_those_that_wait_for_its_part(on_ranks: Ranks) -> None:
    for heard in on_ranks(failing, 4, timeout=60):
        assert "rank 3 failed in 1F1: ValueError: bad weather" in heard
