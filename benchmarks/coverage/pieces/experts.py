"""Mixtures of experts: losses kept on modules, grouped products, loops over experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..subject import Call

WIDTH, EXPERTS = 16, 4


def features() -> Call:
    return (torch.randn(4, 8, WIDTH, requires_grad=True),), {}


class Experts(nn.Module):
    """All experts on all rows, weighted; what is asked of the router's balance stays on it."""

    balance: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        weights, chosen = chances.topk(2)
        counts = F.one_hot(chosen, EXPERTS).float().mean((0, 1, 2))
        self.balance = EXPERTS * (chances.mean((0, 1)) * counts).sum()
        gates = torch.zeros_like(chances).scatter(-1, chosen, weights)
        hidden = torch.einsum("bsd,ndf->bsnf", x, self.up).relu()
        return torch.einsum("bsnf,nfd,bsn->bsd", hidden, self.down, gates)


class LossOnLayers(nn.Module):
    """The loop adds up what the layers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.head(x)
        return found

    def kept(self) -> Any:
        return [layer.balance for layer in self.layers]


class LossesInNewList(LossOnLayers):
    """A list of losses, new in every forward, and a figure for a log."""

    def forward(self, x: Tensor) -> Tensor:
        self.losses: list[Any] = []
        for layer in self.layers:
            x = x + layer(x)
            self.losses.append(layer.balance)
        self.norm = x.detach().norm()
        found: Tensor = self.head(x)
        return found

    def kept(self) -> Any:
        return [*self.losses, self.norm]


class LossesInOneList(LossOnLayers):
    """One list for ever, which every forward empties and fills."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        for layer in self.layers:
            x = x + layer(x)
            self.losses.append(layer.balance)
        found: Tensor = self.head(x)
        return found

    def kept(self) -> Any:
        return self.losses


class Grouped(nn.Module):
    """One operator for the experts' products, over rows that are sorted by expert."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter((torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4).to(dtype))
        self.down = nn.Parameter((torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).int()
        hidden = F.silu(F.grouped_mm(rows[order].to(self.up.dtype), self.up, offs=ends))
        made = F.grouped_mm(hidden, self.down, offs=ends).to(x.dtype)
        out = torch.zeros_like(rows).index_copy(0, order, made)
        return torch.mul(out, weights[:, None]).view_as(x)


class Looped(Experts):
    """Expert by expert, each on the rows that chose it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for expert in range(EXPERTS):
            own, place = torch.where(chosen == expert)
            made = (rows[own] @ self.up[expert]).relu() @ self.down[expert]
            out = out.index_add(0, own, made * weights[own, place, None])
        return out.view_as(x)
