"""Mixtures of experts that ranks exchange tokens for, in the ways in which people write that, and
what one process makes of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
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
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)

    def over(self, mesh: DeviceMesh) -> None:
        """Keep this rank's."""
        for name, weights in dict(self.named_parameters()).items():
            setattr(self, name, nn.Parameter(distribute_tensor(weights.data, mesh, [Shard(0)])))

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


WAYS: tuple[tuple[Exchange | None, ...], ...] = ((functional, None), (function,))
"""How the mixtures of each stage exchange tokens."""


def stage_of(index: int, mesh: DeviceMesh | None = None) -> nn.Sequential:
    torch.manual_seed(index)
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*parts, *(Mixture(way, mesh) for way in WAYS[index]))


def built(mesh: DeviceMesh, first: int = 0) -> Callable[[int], Any]:
    """Stages whose experts are spread over "ep", and sharded where the mesh has "efsdp".

    Args:
        mesh: of the trainer.
        first: which of the stages is the first.
    """
    shards = "efsdp" in (mesh.mesh_dim_names or ())
    dense = mesh["efsdp", "ep"]._flatten("fsdp") if shards else mesh

    def build(index: int) -> Any:
        module = stage_of(first + index, mesh["ep"])
        for part in module.modules() if shards else ():
            if isinstance(part, Experts):
                fully_shard(part, mesh=mesh["efsdp"])
        return fully_shard(module, mesh=dense) if shards else module

    return build


class Reference:
    """Losses and gradients of one process, of shares whose tokens experts get in one call.

    Args:
        stages: of the model.
        sets: shares of the batch, those of one set exchange tokens.

    Attributes:
        losses: by share.
        gradients: by stage and name, the means over the shares.
    """

    def __init__(self, stages: Sequence[int], sets: Sequence[Sequence[int]]) -> None:
        self.losses: dict[int, list[float]] = {}
        self.gradients: dict[str, Tensor] = {}
        count = sum(map(len, sets))
        for shares in sets:
            models = [nn.Sequential(*map(stage_of, stages)) for _ in shares]
            self._run(models, shares)
            for number, model in enumerate(models):
                for name, parameter in model.named_parameters():
                    if number == 0 or ".experts." not in name:
                        grad = cast("Tensor", parameter.grad)
                        before = self.gradients.get(name)
                        self.gradients[name] = grad if before is None else before + grad
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
            if not isinstance(parts[0], Mixture):
                xs = [part(x) for part, x in zip(parts, xs, strict=True)]
                continue
            found = [part.dispatch(x) for part, x in zip(parts, xs, strict=True)]
            made = parts[0].experts(torch.cat([tokens for tokens, _, _ in found], 1))
            ys = made.chunk(len(xs), 1)
            xs = [
                part.combine(x, y, *rest)
                for part, x, y, (_, *rest) in zip(parts, xs, ys, found, strict=True)
            ]
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
