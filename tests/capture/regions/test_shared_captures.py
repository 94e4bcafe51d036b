"""A capture of a block is shared only by blocks and calls with the same graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.runtime import build
from tests.capture.regions.blocks import kinds
from tests.semantics.against_autograd import assert_equals_autograd

SHAPE = (2, 4, 6, 6)


class Convolution(nn.Module):
    """A block whose output has its input's shape, whatever the stride."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(4, 1, 1))
        self.mixing = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, mask: Tensor, sign: float) -> Tensor:
        values = (self.norm(x) @ self.mixing).to(self.convolution.weight.dtype)
        values = self.convolution(values).mean((2, 3), keepdim=True) + self.shift
        return x + values.copysign(sign).to(x.dtype) * mask


class GivenTwice(Convolution):
    """A block that is refused, because its model passes one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor, mask: Tensor, sign: float) -> Tensor:
        return x + super().forward(x, mask, sign) * self.factor


Call = tuple[Tensor, Tensor, float]


class Varied(nn.Module):
    """Each block twice, then a block that is refused. The model is traced twice, because the first
    trace finds the block to refuse; the second trace reuses captures.

    Args:
        vary: for each block, a function that changes it, and one that changes its call's inputs.
    """

    def __init__(self, vary: Mapping[str, tuple[Callable[[Any], object], Callable[..., Call]]]):
        super().__init__()
        self.vary = vary
        self.layers = nn.ModuleDict({f"{n}_{time}": Convolution() for time in "01" for n in vary})
        self.refused = nn.ModuleList(GivenTwice() for _ in range(2))
        for name, layer in self.layers.items():
            vary[name[:-2]][0](layer)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x = layer(*self.vary[name[:-2]][1](x * 0.5, mask * 2, 0.0))
        for layer in self.refused:
            x = layer(x, x, 0.0) * mask
        return x


def _same(*values: Any) -> Any:
    return values


BLOCKS: dict[str, Callable[[Any], object]] = {
    "groups": lambda block: setattr(block.norm, "num_groups", 2),
    "epsilon": lambda block: setattr(block.norm, "eps", 0.1),
    "stride": lambda block: setattr(block.convolution, "stride", (2, 2)),
    "dtype": lambda block: block.convolution.double(),
    "broadcast": lambda block: setattr(block, "shift", nn.Parameter(torch.randn(1, 1, 1))),
    "layout": lambda block: setattr(block, "mixing", nn.Parameter(torch.randn(6, 6).T)),
    "frozen": lambda block: block.shift.requires_grad_(False),
}
CALLS: dict[str, Callable[..., Call]] = {
    "layout": lambda x, mask, sign: (x, mask.transpose(2, 3).contiguous().transpose(2, 3), sign),
    "broadcast": lambda x, mask, sign: (x, mask[:, :1], sign),
    "expanded": lambda x, mask, sign: (x, mask[:, :1].expand(SHAPE), sign),
    "dtype": lambda x, mask, sign: (x, mask.bool(), sign),
    "detached": lambda x, mask, sign: (x, mask.detach(), sign),
    "sign": lambda x, mask, sign: (x, mask, -sign),
}
PLAIN = {"plain": (_same, _same)}
VARIED_BLOCKS = PLAIN | {name: (vary, _same) for name, vary in BLOCKS.items()}
VARIED_CALLS = PLAIN | {name: (_same, vary) for name, vary in CALLS.items()}


@pytest.mark.parametrize("vary", [VARIED_BLOCKS, VARIED_CALLS], ids=["blocks", "calls"])
def test_no_capture_serves_another_graph(vary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []
    split_block = build._split_block

    def counted(*args: Any) -> Any:
        captures.append(args)
        return split_block(*args)

    monkeypatch.setattr(build, "_split_block", counted)
    inputs = torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE).requires_grad_()
    split = assert_equals_autograd(Varied(vary), [inputs] * 2)
    assert kinds(split) == [2] * len(vary)
    assert len(captures) == len(vary) + 1
