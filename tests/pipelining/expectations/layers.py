"""Small modules, in double precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Layer(nn.Module):
    """Two matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.down = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


class WithKeyword(Layer):
    """Takes a keyword that it does not use."""

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Adding(Layer):
    """Takes a keyword that it adds to its input."""

    def forward(self, x: Tensor, y: Tensor, twice: bool = False) -> Tensor:
        return super().forward(x + y * (2 if twice else 1))


class Chain(nn.Module):
    """Layers one after the other; keywords are for the first."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **keywords: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, **keywords)
            keywords = {}
        return x


class _View(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class EndsInView(Layer):
    """Its output is a view that a custom Function made."""

    def forward(self, x: Tensor) -> Tensor:
        return _View.apply(super().forward(x))  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        return grad @ b.mT if needs_a else None, a.mT @ grad if needs_b else None


class OwnProduct(nn.Module):
    """A matrix product with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight)  # type: ignore[no-any-return]


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: object, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return a, b


class TwoOutputsInside(nn.Module):
    """A node with several outputs, one of a weight, in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2, WIDTH // 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split(WIDTH // 2, dim=1)
        a, weight = _Both.apply(a, self.weight)
        return torch.cat([a @ weight * b, b], dim=1)


class Shared(nn.Module):
    """One weight twice, with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.weight) @ self.weight


class Counting(Layer):
    """Counts its forwards in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return super().forward(x)


class Three(nn.Module):
    """Three outputs, of which the last has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.first(x), self.second(x), torch.ones(len(x), 1, dtype=x.dtype)


class Joining(Layer):
    """Takes three inputs."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return super().forward(a * c + b)
