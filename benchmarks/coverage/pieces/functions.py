"""Functions that differentiate inside of themselves, compiled parts, and caches of first calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..subject import Call
from .experts import WIDTH, features


class _Recomputed(torch.autograd.Function):
    """Keeps what came in only; its backward runs the layers again and asks autograd."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return _layers(*given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            made = _layers(*given)
        return torch.autograd.grad(made, given, grad)


def _layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + _Recomputed.apply(x, self.up, self.down))  # type: ignore[no-untyped-call]
        return found


class _ChunkedLoss(torch.autograd.Function):
    """A head and its loss, some rows at a time, differentiated in the forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        by_rows, by_weight = torch.zeros_like(rows), torch.zeros_like(weight)
        loss = rows.new_zeros(())
        for first in range(0, len(rows), 16):
            own = slice(first, first + 16)
            given = rows[own].detach().requires_grad_(), weight.detach().requires_grad_()
            with torch.enable_grad():
                part = F.cross_entropy(given[0] @ given[1].t(), targets[own], reduction="sum")
            by_rows[own], made = torch.autograd.grad(part, given)
            by_weight += made
            loss += part.detach()
        ctx.save_for_backward(by_rows, by_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *(each * grad for each in ctx.saved_tensors), None


class ChunkedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 31, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        rows = self.layer(x).reshape(-1, WIDTH)
        found: Tensor = _ChunkedLoss.apply(rows, self.head.weight, targets.flatten())  # type: ignore[no-untyped-call]
        return found


def with_targets() -> Call:
    return (*features()[0], torch.randint(31, (4, 8))), {}


class Layers(nn.Module):
    """Residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.run(block, x)
        return x

    def run(self, block: nn.Module, x: Tensor) -> Any:
        return x + block(x)


class Regions(Layers):
    @torch.compiler.nested_compile_region
    def run(self, block: nn.Module, x: Tensor) -> Any:
        return x + block(x)


def compiled_blocks() -> nn.Module:
    model = Layers()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def wrapped_blocks() -> nn.Module:
    model = Layers()
    for index, block in enumerate(model.blocks):
        compiled: Any = torch.compile(block, backend="aot_eager")
        model.blocks[index] = compiled
    return model


_backends: dict[type, Callable[[Tensor, int], Tensor]] = {}


def _by_heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(_shape(tuple(x.shape), heads)).transpose(1, 2)


@functools.lru_cache
def _shape(shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
    return *shape[:-1], heads, shape[-1] // heads


class Rearranged(nn.Module):
    """Finds what is for a class of tensors in its first call with one, as einops does: a parameter
    is of another class than what is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 8, WIDTH))
        _backends.clear()

    def forward(self, x: Tensor) -> Tensor:
        return self.rearranged(self.layer(x)) + self.rearranged(self.places)

    def rearranged(self, x: Tensor) -> Tensor:
        if type(x) not in _backends:
            _backends[type(x)] = _by_heads
        return _backends[type(x)](x, 2)
