"""Mixtures of experts that ranks exchange tokens for, and attention that goes around a ring of
ranks, in the ways in which people write that; and what one process makes of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

from .workers import M, norm_of, share, whole

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
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = torch.empty_like(grads[0])
        dist.all_to_all_single(found, grads[0].contiguous(), group=ctx.group)
        return found, None


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
            own = distribute_tensor(weights.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(own))

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

    def dispatch(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, rows = self.router(x).softmax(-1).t().topk(TOKENS)
        return x[rows], gate, rows

    def combine(self, x: Tensor, y: Tensor, gate: Tensor, rows: Tensor) -> Tensor:
        return x.index_add(0, rows.flatten(), (y * gate[..., None]).flatten(0, 1))

    def apart(self, tokens: Tensor) -> Tensor:
        """What all experts make of this rank's tokens."""
        if self.mesh is None:
            return cast("Tensor", self.experts(tokens))
        if self.exchange is None:  # DTensors exchange them
            there = DTensor.from_local(tokens, self.mesh, [Shard(1)]).redistribute(
                placements=[Shard(0)]
            )
            back: DTensor = self.experts(there).redistribute(placements=[Shard(1)])
            return back.to_local()
        ranks = self.mesh.size()
        came = self.exchange(tokens, self.mesh).unflatten(0, (ranks, -1)).transpose(0, 1)
        made = self.experts(came.flatten(1, 2)).unflatten(1, (ranks, -1)).transpose(0, 1)
        return self.exchange(made.flatten(0, 1), self.mesh)

    def forward(self, x: Tensor) -> Tensor:
        tokens, gate, rows = self.dispatch(x)
        return self.combine(x, self.apart(tokens), gate, rows)

    @staticmethod
    def together(parts: Sequence[Mixture], xs: Sequence[Tensor]) -> list[Tensor]:
        found = [part.dispatch(x) for part, x in zip(parts, xs, strict=True)]
        made = parts[0].experts(torch.cat([tokens for tokens, _, _ in found], 1))
        ys = made.chunk(len(xs), 1)
        return [
            part.combine(x, y, *rest)
            for part, x, y, (_, *rest) in zip(parts, xs, ys, found, strict=True)
        ]


class Dropless(nn.Module):
    """Each token goes to the expert that it wants most, of which each rank has one."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), Experts(2)
        self.mesh: Any = mesh
        if mesh is not None:
            self.experts.over(mesh)

    def dispatch(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate, expert = self.router(x).softmax(-1).max(-1)
        rows = expert.argsort(stable=True)
        counts = (expert[:, None] == torch.arange(2)).sum(0)
        return x[rows], counts, gate[rows], rows

    def combine(self, x: Tensor, y: Tensor, gate: Tensor, rows: Tensor) -> Tensor:
        return x.index_add(0, rows, y * gate[:, None])

    def forward(self, x: Tensor) -> Tensor:
        tokens, counts, gate, rows = self.dispatch(x)
        if self.mesh is None:
            places = torch.arange(len(x))
            which = (places[:, None] >= counts.cumsum(0)).sum(-1)
            every = self.experts(tokens.expand(2, -1, -1))
            return self.combine(x, every[which, places], gate, rows)
        group = self.mesh.get_group()
        theirs = all_to_all_single(counts, None, None, group)
        given, taken = counts.tolist(), theirs.tolist()
        came = all_to_all_single_autograd(tokens, taken, given, group)
        made = self.experts(came[None])[0]
        return self.combine(x, all_to_all_single_autograd(made, given, taken, group), gate, rows)

    @staticmethod
    def together(parts: Sequence[Dropless], xs: Sequence[Tensor]) -> list[Tensor]:
        found = [part.dispatch(x) for part, x in zip(parts, xs, strict=True)]
        given = [tokens.split(counts.tolist()) for tokens, counts, _, _ in found]
        up, down = parts[0].experts.up, parts[0].experts.down
        made = [
            torch.bmm(torch.bmm(torch.cat(each)[None], up[at, None]).tanh(), down[at, None])[0]
            for at, each in enumerate(zip(*given, strict=True))
        ]
        back = zip(
            *(
                each.split([len(part) for part in parts_])
                for each, parts_ in zip(made, zip(*given, strict=True), strict=True)
            ),
            strict=True,
        )
        return [
            part.combine(x, torch.cat(y), gate, rows)
            for part, x, y, (_, _, gate, rows) in zip(parts, xs, back, found, strict=True)
        ]


@torch.library.custom_op("autosplit_tests::sent", mutates_args=())
def sent(x: Tensor, places: int, name: str) -> Tensor:
    """What the rank so many places before has, by messages, which no graph holds."""
    group = _resolve_process_group(name)
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    came = torch.empty_like(x)
    both = [  # together: over NCCL, one behind the other would wait for the other rank's
        dist.P2POp(dist.isend, x.contiguous(), ranks[(own + places) % len(ranks)], group),
        dist.P2POp(dist.irecv, came, ranks[(own - places) % len(ranks)], group),
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
        back = [(at - 1) % count for at in range(count)]
        return permute_tensor(grads[0].flatten(), back, ctx.group).view_as(grads[0]), None


def permuted(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast("Tensor", _Permuted.apply(x, group))  # type: ignore[no-untyped-call]


Around = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""Hands a tensor to the next rank, and gives that of the one before."""


class Ring(nn.Module):
    """Attention of a sequence of which ranks have parts: a microbatch is a part of one."""

    def __init__(self, way: Around | None = None, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way: Any = way
        self.mesh: Any = mesh

    def attend(self, x: Tensor, q: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Attention to one part of the sequence after another."""
        total = made = top = None
        for part in parts:
            k, v = part.chunk(2, -1)
            scores = q @ k.t() / WIDTH**0.5
            peak = scores.amax(-1, keepdim=True)
            found = (scores - peak).exp()
            if made is None or total is None or top is None:
                made, total, top = found @ v, found.sum(-1, keepdim=True), peak
                continue
            most = torch.maximum(top, peak)
            before, now = (top - most).exp(), (peak - most).exp()
            made = made * before + found @ v * now
            total, top = total * before + found.sum(-1, keepdim=True) * now, most
        return x + cast("Tensor", self.out(cast("Tensor", made) / total))

    def _around(self, part: Tensor) -> Iterable[Tensor]:
        yield part
        for _ in range(self.mesh.size() - 1):
            part = self.way(part, self.mesh.get_group())
            yield part

    def forward(self, x: Tensor) -> Tensor:
        q, part = self.read(x).split((WIDTH, 2 * WIDTH), -1)
        return self.attend(x, q, list(self._around(part)))

    @staticmethod
    def together(parts: Sequence[Ring], xs: Sequence[Tensor]) -> list[Tensor]:
        read = [
            part.read(x).split((WIDTH, 2 * WIDTH), -1) for part, x in zip(parts, xs, strict=True)
        ]
        return [
            part.attend(x, read[own][0], [read[own - at][1] for at in range(len(xs))])
            for own, (part, x) in enumerate(zip(parts, xs, strict=True))
        ]


WAYS: dict[str, tuple[tuple[Callable[[DeviceMesh | None], nn.Module], ...], ...]] = {
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


class Reference:
    """Losses and gradients of one process, for shares of the batch, several of which run at once.

    Args:
        name: of ``WAYS`` in which ranks exchange what they compute.
        stages: of the model.
        sets: shares of the batch, those of one set are run at once.

    Attributes:
        losses: by share.
        gradients: by stage and name, the means over the shares.
    """

    def __init__(self, name: str, stages: Sequence[int], sets: Sequence[Sequence[int]]) -> None:
        self.losses: dict[int, list[float]] = {}
        self.gradients: dict[str, Tensor] = {}
        count = sum(map(len, sets))
        for shares in sets:
            models = [
                nn.Sequential(*(stage_of(stage, None, name) for stage in stages)) for _ in shares
            ]
            self._run(models, shares)
            for number, model in enumerate(models):
                for own, parameter in model.named_parameters():
                    if number == 0 or ".experts." not in own:
                        grad = cast("Tensor", parameter.grad)
                        before = self.gradients.get(own)
                        self.gradients[own] = grad if before is None else before + grad
        self.gradients = {name: total / count for name, total in self.gradients.items()}
        self.norm = norm_of(self.gradients.values())

    def _run(self, models: Sequence[nn.Sequential], shares: Sequence[int]) -> None:
        batches = [[part.chunk(M) for part in share(each)] for each in shares]
        for at in range(M):
            found = self._together(models, [inputs[at] for inputs, _ in batches])
            targets = [given[at] for _, given in batches]
            losses = list(map(nn.functional.mse_loss, found, targets))
            sum(loss / M for loss in losses).backward()  # type: ignore[union-attr]
            for each, loss in zip(shares, losses, strict=True):
                self.losses.setdefault(each, []).append(loss.item())

    @staticmethod
    def _together(models: Sequence[nn.Sequential], xs: list[Tensor]) -> list[Tensor]:
        stages: Any = zip(*models, strict=True)
        for parts in (part for stage in stages for part in zip(*stage, strict=True)):
            if hasattr(parts[0], "together"):
                xs = parts[0].together(parts, xs)
            else:
                xs = [part(x) for part, x in zip(parts, xs, strict=True)]
        return xs

    def agrees(self, made: Any, own: int, *, exact: Callable[[str], bool]) -> None:
        """Check a step's losses, gradients and norm.

        Args:
            made: the trainer; runs it.
            own: this rank's share.
            exact: of which gradients the bits must be the same; of others all but rounding.
        """
        losses = made.forward_backward(share(own)).tolist()
        mine = {
            f"{stage}.{name}": whole(gradient)
            for stage, gradients in made.gradients().items()
            for name, gradient in gradients.items()
        }
        assert losses == self.losses[own]
        assert mine
        for name, gradient in mine.items():
            if exact(name):
                assert torch.equal(gradient, self.gradients[name]), name
            else:
                torch.testing.assert_close(gradient, self.gradients[name])
        exactly = all(map(exact, self.gradients))
        assert (
            made.grad_norm == self.norm if exactly else abs(made.grad_norm / self.norm - 1) < 1e-6
        )
