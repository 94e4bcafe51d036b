"""What ranks run in test_sharded_tensors.py: stages that are sharded, and whose tensors ranks
share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import autosplit
from autosplit.pipeline import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage

from .tensor_parallel_workers import (
    FEW,
    Block,
    M,
    Reference,
    batch,
    loss_of,
    parallel,
    stage_of,
    still,
    trainer,
)
from .workers import norm_of, refusal, round_trip, whole

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Build = Callable[[int], Any]
PLAIN: dict[str, Any] = {"stage_factory": ReferenceStage}


def sharded(mesh: DeviceMesh, build: Build, **options: Any) -> Build:
    """A group for each block, and one for what is left."""

    def stage(index: int) -> nn.Module:
        module = build(index)
        for part in module:
            if isinstance(part, Block):
                fully_shard(part, mesh=mesh["dp_shard"], **options)
        made: nn.Module = fully_shard(module, mesh=mesh["dp_shard"], **options)
        return made

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


def all_shared(mesh: DeviceMesh) -> Build:
    """A stage of one block and a head."""
    return still(parallel(mesh, 1, 1))


class Eager:
    """Losses and gradients of torch's FSDP2, which reduces behind the last microbatch."""

    def __init__(self, model: Any, share: tuple[Tensor, Tensor], loss_fn: Any = loss_of) -> None:
        self.losses = []
        for number, (x, y) in enumerate(zip(*(each.chunk(M) for each in share), strict=True)):
            model.set_requires_gradient_sync(number == M - 1)
            with loss_parallel():
                loss = loss_fn(model(x), y)
                (loss / M).backward()
            self.losses.append(whole(loss.detach()).item())
        self.gradients = {name: whole(p.grad) for name, p in model.named_parameters()}


def lie_alike(made: PipelineTrainer) -> bool:
    """Whether each gradient lies over ranks as its parameter does, or is as plain."""

    def lies(tensor: Any) -> tuple[Any, ...]:
        return getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)

    pairs = [
        (gradient, dict(made.modules[stage].named_parameters())[name])
        for stage, gradients in made.gradients().items()
        for name, gradient in gradients.items()
    ]
    return bool(pairs) and all(lies(a) == lies(b) for a, b in pairs)


def gradients_of(made: PipelineTrainer, stages: int) -> dict[str, Tensor]:
    """By name in the whole model."""
    found = {}
    for stage, gradients in made.gradients().items():
        for name, gradient in gradients.items():
            at, _, own = name.partition(".")
            found[f"{int(at) + stage * FEW // stages}.{own}"] = whole(gradient)
    return found


EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (1, {"memory": "lean", "overlap": "none"}),
}


def exactness(mesh: DeviceMesh, expected: Any, case: str) -> dict[str, Any]:
    stages, options = EXACT[case]
    build = sharded(mesh, still(parallel(mesh, stages, stages)))
    share = batch(mesh.get_local_rank("dp_shard"))
    with loss_parallel(), trainer(mesh, stages, build, **options) as made:
        losses = made.forward_backward(share).tolist()
        mine = gradients_of(made, stages)
        return {
            "losses": losses == expected.losses[mesh.get_local_rank("dp_shard")],
            "gradients": all(torch.equal(g, expected.gradients[k]) for k, g in mine.items()),
            "all": len(mine) == len(expected.gradients),
            "lie": lie_alike(made),
            "norm": made.grad_norm == expected.norm,
        }


def beside_torch(mesh: DeviceMesh, build: Callable[[DeviceMesh], Build], **options: Any) -> Any:
    """A step held against FSDP2 of the same module."""
    share = batch(mesh.get_local_rank("dp_shard"))
    with torch.random.fork_rng():
        plain = build(mesh)(0)
        for part in plain:  # as a trainer starts: with the first rank's values
            if isinstance(part, Block) and not hasattr(part.norm.bias, "placements"):
                dist.broadcast(part.norm.bias.detach(), group=mesh.get_group("tp"), group_src=0)
        expected = Eager(sharded(mesh, lambda index: plain, **options)(0), share)
    with loss_parallel(), trainer(mesh, 1, sharded(mesh, build(mesh), **options)) as made:
        losses = made.forward_backward(share).tolist()
        mine = gradients_of(made, 1)
        return {
            "losses": losses == expected.losses,
            "gradients": all(torch.equal(g, expected.gradients[k]) for k, g in mine.items()),
            "norm": made.grad_norm == norm_of(expected.gradients.values()),
        }


def split(mesh: DeviceMesh) -> dict[str, bool]:
    """Steps of a split module, held against FSDP2 of the same module unsplit."""
    found = []
    pending = []
    for wrap in (lambda model: model, autosplit.split):
        plain = sharded(mesh, all_shared(mesh))(0)
        model: Any = wrap(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        seen = []
        for step in range(2):
            share = batch(mesh.get_local_rank("dp_shard"), step)
            for number, (x, y) in enumerate(zip(*(e.chunk(M) for e in share), strict=True)):
                plain.set_requires_gradient_sync(model is not plain or number == M - 1)
                with loss_parallel():
                    loss_of(model(x), y).backward()
            pending += [isinstance(p.grad, DTensor) for p in model.parameters()]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen += [norm, *model.parameters()]
        found.append([whole(each.detach()) for each in seen])
    return {
        "steps": all(map(torch.equal, *found)),
        "many": len(found[0]) > 12,
        "pending gradients are DTensors": all(pending),
    }


def saved(mesh: DeviceMesh, folder: Path) -> dict[str, bool]:
    """On 2 x 2, and in one process."""
    build = sharded(mesh, norms_apart(mesh))
    return round_trip(
        lambda: trainer(mesh, 1, build, max_grad_norm=0.5),
        lambda: trainer(None, 1, lambda index: stage_of(index, 1, 1), ranks=1, **PLAIN),
        lambda step: batch(mesh.get_local_rank("dp_shard"), step),
        folder,
        lambda stage, name: name,
    )


def refused(mesh: DeviceMesh) -> dict[str, str]:
    def built(build: Build, over: DeviceMesh = mesh) -> str:
        return refusal(lambda: trainer(over, 1, build))

    def elsewhere(index: int) -> nn.Module:
        """Ranks share tensors along dp_shard, and shards lie along tp."""
        module = norms_apart(turned)(index)
        made: nn.Module = fully_shard(module, mesh=turned["dp_shard"])
        return made

    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))
    some = mesh if dist.get_rank() % 2 else None
    line = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard", "tp"))
    fewer = sharded(line, norms_apart(line), reshard_after_forward=2)
    return {
        "elsewhere": built(elsewhere),
        "fewer ranks": built(fewer, line),
        "on some ranks": refusal(lambda: trainer(some, 4, lambda index: stage_of(index, 4))),
    }


def four_ranks(folder: Path) -> dict[str, Any]:
    """Cases on dp_shard 2 x tp 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    expected = Reference(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp")), 1)
    found: dict[str, Any] = {case: exactness(mesh, expected, case) for case in EXACT}
    found["half"] = beside_torch(mesh, norms_apart, mp_policy=HALF)
    found["split"] = split(mesh)
    found["saved"] = saved(mesh, folder)
    found["refused"] = refused(mesh)
    return found
