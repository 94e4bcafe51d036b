"""What eight ranks run in test_three_dimensions.py."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from autosplit.errors import AutosplitError
from autosplit.pipeline import PipelineTrainer

from .sharded_tensor_workers import gradients_of, lie_alike
from .tensor_parallel_workers import (
    FEW,
    WIDTH,
    batch,
    trainer,
)
from .workers import of_shares


def _mesh(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)


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


class Odd(nn.Module):
    """A block of which neither what a rank has along tp nor what it has the whole of can be sharded
    evenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH + 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(weather(self.up(x))) + self.mix(x)[..., 1:]
        return found


def odd(mesh: DeviceMesh, stages: int) -> Callable[[int], Any]:
    """Stages of such blocks, two in all."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def build(index: int) -> Any:
        parts = []
        for number in range(index * FEW // stages, (index + 1) * FEW // stages):
            torch.manual_seed(number)
            parts.append(parallelize_module(Odd(), mesh["tp"], plan))
        return nn.Sequential(*parts)

    return build


def mean_square(y: Tensor, _: Tensor) -> Tensor:
    return y.square().mean()


class Shares:
    """Eager mode's losses of two shares of a batch, and the means of their gradients: of the same
    modules in one stage, which are not sharded.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.losses, self.gradients, self.norm = of_shares(
            odd(mesh, 1)(0), map(batch, range(2)), mean_square
        )

    def compared(self, made: PipelineTrainer, share: int) -> dict[str, bool]:
        """With a step of two stages over this rank's share."""
        losses = made.forward_backward(batch(share)).tolist()
        mine = gradients_of(made, 2)
        return {
            "losses": losses == self.losses[share],
            "gradients": all(torch.equal(g, self.gradients[name]) for name, g in mine.items()),
            "all": 2 * len(mine) == len(self.gradients),
            "lie": lie_alike(made),
            "norm": made.grad_norm == self.norm,
        }


def replicas_of_shared_stages() -> dict[str, Any]:
    mesh = _mesh("pp", "dp_replicate", "tp")
    with trainer(mesh, 2, odd(mesh, 2), loss_fn=mean_square) as made:
        return Shares(mesh).compared(made, mesh.get_local_rank("dp_replicate"))


def uneven_shards(found: Path) -> None:
    """A step, and then rank 5 is killed in the second microbatch of another."""
    global _to_live
    mesh = _mesh("pp", "dp_shard", "tp")

    def build(index: int) -> Any:
        module = odd(mesh, 2)(index)
        fully_shard(module[0], mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    own = mesh.get_local_rank("dp_shard")
    with trainer(mesh, 2, build, loss_fn=mean_square) as made:
        same: dict[str, Any] = Shares(mesh).compared(made, own)
        rows = [p.to_local().shape[0] for m in made.modules.values() for p in m.parameters()]
        same["uneven"] = sorted(set(rows)) == ([2, 3] if own == 0 else [1, 2])
        found.write_bytes(pickle.dumps(same))
        _to_live = 2 if dist.get_rank() == 5 else 0
        made.step(batch(own))


def with_a_death(folder: Path) -> None:
    """What the cases find, and what ranks see of one that is killed in the end, is left in a
    folder.
    """
    rank = dist.get_rank()
    (folder / f"replicas_of_shared_stages{rank}").write_bytes(
        pickle.dumps(replicas_of_shared_stages())
    )
    try:
        uneven_shards(folder / f"uneven_shards{rank}")
    except AutosplitError as error:
        (folder / f"seen{rank}").write_text(str(error))
        raise
