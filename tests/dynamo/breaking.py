"""Models that no single graph holds, each with what breaks it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoLayers(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(dim, dim)
        self.b = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).relu()
        torch._dynamo.graph_break()
        return self.b(h)


class Printing(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        print("between the layers")
        return self.b(h)


class Branch(TwoLayers):
    """Takes the one path or the other, by the sign of a value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            return self.b(h)
        return h.tanh()


class Item(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) * h.max().item()


class SideEffects(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.log: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x).relu()
        torch._dynamo.graph_break()
        self.log.append(f"{len(x)} rows")
        return self.b(h)


class DisabledMiddle(TwoLayers):
    """The layer in the middle runs as ordinary Python, with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(4, 4)

    @torch.compiler.disable
    def untraceable(self, h: Tensor) -> Tensor:
        return self.middle(h).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.untraceable(self.a(x).relu()))


class Tied(TwoLayers):
    """One weight in three graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        torch._dynamo.graph_break()
        h = self.b(h).tanh()
        torch._dynamo.graph_break()
        return F.linear(h, self.a.weight)


class Statistics(TwoLayers):
    """Buffers that the forward updates, on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x)).relu()
        torch._dynamo.graph_break()
        self.scale.mul_(1.5)
        return self.b(h) * self.scale


class Nested(TwoLayers):
    """Several outputs, one of which a loss may leave out."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        torch._dynamo.graph_break()
        return {"y": h.relu(), "rest": [self.b(h), h.argmax(-1), (None, "text")], "view": h[:2]}


class WeightElsewhere(TwoLayers):
    """The graph that uses a weight is not the graph that the parameter enters."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.a.weight * 2
        torch._dynamo.graph_break()
        return self.b(F.linear(x, doubled, self.a.bias))


class WeightView(TwoLayers):
    """A view of a parameter leaves the graph, in which the parameter is used as well."""

    def forward(self, x: Tensor) -> Tensor:
        transposed = self.a.weight.t()
        h = self.a(x)
        torch._dynamo.graph_break()
        return self.b(h @ transposed)


class WrittenParameter(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            self.b.weight.mul_(0.9)
        torch._dynamo.graph_break()
        return self.b(h)


class PartlyFrozen(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class Unbreakable(TwoLayers):
    """A break where Dynamo cannot resume: the whole function runs as ordinary Python."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.a(x)
            torch._dynamo.graph_break()
            h = h.relu()
        finally:
            pass
        return self.b(h)


MODELS: tuple[type[TwoLayers], ...] = (
    TwoLayers,
    Printing,
    Branch,
    Item,
    SideEffects,
    DisabledMiddle,
    Tied,
    Statistics,
    Nested,
    WeightElsewhere,
    WeightView,
    WrittenParameter,
    PartlyFrozen,
    Unbreakable,
)


def loss_of(output: Any) -> Tensor:
    """A loss that leaves out the second layer's output of ``Nested``."""
    if isinstance(output, dict):
        return output["y"].pow(3).sum() + output["view"].square().sum()
    return output.square().sum()


def factory() -> tuple[nn.Module, Tensor]:
    """For the command line."""
    return TwoLayers(), torch.ones(3, 4)
