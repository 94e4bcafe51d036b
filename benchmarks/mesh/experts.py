"""How much of dispatch and combine the weight gradients of a mixture of experts hide, timed over a
link that takes time.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .collectives import WIDTH, Attention, Subject

EXPERTS, CAPACITY, LAYERS = 4, 128, 3
"""Of a layer; tokens that an expert takes of each rank's; of the model."""

_FLOPS = 2 * (EXPERTS // 2) * (2 * CAPACITY) * WIDTH * 4 * WIDTH


class Mixture(nn.Module):
    """Experts, each of which takes those tokens of each rank that want it most."""

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        self.ep, self.norm = ep, nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        sizes = ((EXPERTS, WIDTH, 4 * WIDTH), (EXPERTS, 4 * WIDTH, WIDTH))
        self.up, self.down = (
            nn.Parameter(distribute_tensor(torch.randn(each), ep, [Shard(0)])) for each in sizes
        )

    def _exchanged(self, x: Tensor) -> Tensor:
        parts = [EXPERTS // self.ep.size()] * self.ep.size()
        found: Tensor = all_to_all_single_autograd(x, parts, parts, self.ep.get_group())
        return found

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        gate, rows = self.router(tokens).softmax(-1).t().topk(CAPACITY)
        ranks = self.ep.size()
        came = self._exchanged(tokens[rows]).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
        up, down = (cast("DTensor", each).to_local() for each in (self.up, self.down))
        made = torch.bmm(nn.functional.gelu(torch.bmm(came, up)), down)
        back = self._exchanged(made.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1))
        mixed = (back * gate[..., None]).flatten(0, 1)
        return x + torch.zeros_like(tokens).index_add(0, rows.flatten(), mixed).view_as(x)


def _model(ep: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (Attention(), Mixture(ep))))


MIXTURE = Subject(_model, flops=_FLOPS)
