"""Mixtures of experts that ranks exchange tokens for, and attention that goes around a ring of
ranks, in the ways in which people write that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    permute_tensor,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, EXPERTS, TOKENS = 6, 4, 2
"""Of a token; in a mixture; that an expert takes of each rank's."""

Exchange = Callable[[Tensor, DeviceMesh], Tensor]
"""Swaps the parts of the first dimension with the other ranks."""


def functional(x: Tensor, mesh: DeviceMesh) -> Tensor:
    sizes = [len(x) // mesh.size()] * mesh.size()
    return cast("Tensor", all_to_all_single_autograd(x, sizes, sizes, mesh.get_group()))


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        result = torch.empty_like(grads[0])
        dist.all_to_all_single(result, grads[0].contiguous(), group=ctx.group)
        return result, None


def function(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return cast("Tensor", _Swap.apply(x, mesh.get_group()))  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / 3)

    def over(self, mesh: DeviceMesh) -> None:
        """Keep this rank's; nothing is sent, over a group that a refused trainer may have ended."""
        for name, weights in dict(self.named_parameters()).items():
            local = distribute_tensor(weights.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(local))

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        if isinstance(up, DTensor) and not isinstance(x, DTensor):
            up, down = up.to_local(), down.to_local()
        return torch.bmm(torch.bmm(x, up).tanh(), down)


class Mixture(nn.Module):
    """Each expert takes those tokens of each rank that want it most."""

    def __init__(self, exchange: Exchange | None = None, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.exchange, self.mesh = exchange, mesh
        if mesh is not None:
            self.experts.over(mesh)

    def apart(self, tokens: Tensor) -> Tensor:
        """Return the outputs of all experts for this rank's tokens."""
        if self.mesh is None:
            return cast("Tensor", self.experts(tokens))
        if self.exchange is None:  # DTensors exchange them
            present = DTensor.from_local(tokens, self.mesh, [Shard(1)]).redistribute(
                placements=[Shard(0)]
            )
            returned: DTensor = self.experts(present).redistribute(placements=[Shard(1)])
            return returned.to_local()
        ranks = self.mesh.size()
        came = self.exchange(tokens, self.mesh).unflatten(0, (ranks, -1)).transpose(0, 1)
        built = self.experts(came.flatten(1, 2)).unflatten(1, (ranks, -1)).transpose(0, 1)
        return self.exchange(built.flatten(0, 1), self.mesh)

    def forward(self, x: Tensor) -> Tensor:
        gate, rows = self.router(x).softmax(-1).t().topk(TOKENS)
        y = self.apart(x[rows]) * gate[..., None]
        return x.index_add(0, rows.flatten(), y.flatten(0, 1))


class Dropless(nn.Module):
    """Each token goes to the expert that it wants most, of which each rank has one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), Experts(2)
        self.group = mesh.get_group()
        self.experts.over(mesh)

    def forward(self, x: Tensor) -> Tensor:
        gate, expert = self.router(x).softmax(-1).max(-1)
        rows = expert.argsort(stable=True)
        counts = (expert[:, None] == torch.arange(2)).sum(0)
        theirs = all_to_all_single(counts, None, None, self.group)
        inputs, received = counts.tolist(), theirs.tolist()
        came = all_to_all_single_autograd(x[rows], received, inputs, self.group)
        built = self.experts(came[None])[0]
        returned = all_to_all_single_autograd(built, inputs, received, self.group)
        return x.index_add(0, rows, returned * gate[rows, None])


@torch.library.custom_op("autosplit_tests::sent", mutates_args=())
def sent(x: Tensor, places: int, name: str) -> Tensor:
    """Receive the tensor of the rank ``places`` before, by messages outside any graph."""
    group = _resolve_process_group(name)
    ranks, local = dist.get_process_group_ranks(group), dist.get_rank(group)
    came = torch.empty_like(x)
    both = [  # together: over NCCL, one behind the other would wait for the other rank's
        dist.P2POp(dist.isend, x.contiguous(), ranks[(local + places) % len(ranks)], group),
        dist.P2POp(dist.irecv, came, ranks[(local - places) % len(ranks)], group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return came


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.places, ctx.name = inputs


def _sent_back(ctx: Any, grad: Tensor) -> Any:
    return sent(grad.contiguous(), -ctx.places, ctx.name), None, None


sent.register_fake(lambda x, places, name: torch.empty_like(x))
sent.register_autograd(_sent_back, setup_context=_keep)


def by_messages(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return sent(x.contiguous(), 1, group.group_name)


class _Permuted(torch.autograd.Function):
    """The same by a functional collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, count = group, group.size()
        targets = [(at + 1) % count for at in range(count)]
        return permute_tensor(x.flatten(), targets, group).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count = ctx.group.size()
        returned = [(at - 1) % count for at in range(count)]
        return permute_tensor(grads[0].flatten(), returned, ctx.group).view_as(grads[0]), None


def permuted(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast("Tensor", _Permuted.apply(x, group))  # type: ignore[no-untyped-call]


Around = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""Hands a tensor to the next rank, and gives that of the one before."""


class Ring(nn.Module):
    """Attention of a sequence of which ranks have parts: a microbatch is a part of one."""

    def __init__(self, way: Around, mesh: DeviceMesh) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way, self.mesh = way, mesh

    def forward(self, x: Tensor) -> Tensor:
        """Attention to one part of the sequence after another."""
        q, part = self.read(x).split((WIDTH, 2 * WIDTH), -1)
        built = total = torch.zeros(())
        most = torch.full((len(x), 1), -torch.inf)
        for at in range(self.mesh.size()):
            part = self.way(part, self.mesh.get_group()) if at else part
            k, v = part.chunk(2, -1)
            scores = q @ k.t() / WIDTH**0.5
            earlier, most = most, torch.maximum(most, scores.amax(-1, keepdim=True))
            result, scale = (scores - most).exp(), (earlier - most).exp()
            built, total = built * scale + result @ v, total * scale + result.sum(-1, keepdim=True)
        return x + cast("Tensor", self.out(built / total))


WAYS: dict[str, tuple[tuple[Callable[[Any], nn.Module], ...], ...]] = {
    "ep": (
        (partial(Mixture, functional), partial(Mixture, None)),
        (partial(Mixture, function), Dropless),
    ),
    "few": ((partial(Mixture, functional),), (partial(Mixture, None),)),
    "cp": ((partial(Ring, by_messages),), (partial(Ring, permuted),)),
}
"""What is in each stage; all ways with experts, or a few of them, of which a capture is short."""


def stage_of(index: int, mesh: DeviceMesh | None = None, name: str = "few") -> nn.Sequential:
    torch.manual_seed(index)
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*parts, *(way(mesh) for way in WAYS[name][index]))


def built(mesh: DeviceMesh, ways: str = "") -> Callable[[int], Any]:
    """Stages whose ranks exchange what they compute along "ep" or "cp", sharded where the mesh has
    a dimension for that.

    Args:
        mesh: of the trainer.
        ways: of ``WAYS``.
    """
    names = mesh.mesh_dim_names or ()
    name = "ep" if "ep" in names else "cp"
    outer = "efsdp" if name == "ep" else "dp_shard"
    shards = outer in names
    dense = mesh[outer, name]._flatten("fsdp") if shards else mesh

    def build(index: int) -> Any:
        module = stage_of(index, mesh[name], ways or ("few" if name == "ep" else name))
        for part in module.modules() if shards else ():
            if isinstance(part, Experts):
                fully_shard(part, mesh=mesh["efsdp"])
        return fully_shard(module, mesh=dense) if shards else module

    return build
