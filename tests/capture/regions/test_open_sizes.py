"""Blocks in graphs for any size: captured once a kind, with what they assume of sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.regions.blocks import WIDTH, Gated, Plain, Residual, Stack, kinds
from tests.semantics.against_autograd import assert_equals_autograd


def batches(*lengths: int) -> list[tuple[Tensor]]:
    return [(torch.randn(2, length, WIDTH).requires_grad_(),) for length in lengths]


class Attending(Plain):
    """Attention before the products, for any length."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = x.view(rows, length, 2, width // 2).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        result: Tensor = super().forward(x + attended.transpose(1, 2).flatten(2))
        return result


class Branching(Plain):
    """Another function of an even length, and no product for a long one."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2 == 0:
            x = x.sin()
        return x * 2 if x.shape[1] > 10 else super().forward(x)


class Halving(Residual):
    """Half as long each time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, ::2])


class Positions(Plain):
    """Positions up to the length, made in the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(x.shape[1])[:, None] / x.shape[1])


class OfOneLength(Plain):
    """Its bias is for one length."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.bias = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.bias if x.shape[1] == len(self.bias) else x)


@pytest.mark.parametrize(
    ("block", "lengths", "captures", "called"),
    [
        (Attending, (5, 7, 2, 30), 2, [2]),
        (Positions, (5, 7, 6), 2, [2]),
        (Branching, (5, 7, 6, 8, 12, 14, 11, 15), 5, [2]),
        # The length is fixed once the first block has shown that it cannot be open.
        (OfOneLength, (5, 7, 9, 6), 3, [1, 1]),
        (Halving, (50, 70, 64, 33), 2, [1, 1]),
    ],
)
def test_sizes_are_open_around_blocks(
    block: type[nn.Module], lengths: Sequence[int], captures: int, called: list[int]
) -> None:
    split = assert_equals_autograd(Stack(block, 2), batches(*lengths))
    assert (len(split.functions), kinds(split)) == (captures, called)


class GivenTwice(Stack):
    """Passes one tensor twice to the last two blocks, which a second trace captures with the model,
    and doubles long results of the others.
    """

    def __init__(self) -> None:
        super().__init__(lambda index: Gated(*map(Plain, range(1 + index // 2))), 4)

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x, x.sin() if at < 2 else x)
            if at == 1 and x.shape[1] > 10:
                x = x * 2
        return self.head(x)


def test_a_second_trace_captures_blocks_for_its_own_symbols() -> None:
    split = assert_equals_autograd(GivenTwice(), batches(5, 7, 30))
    assert kinds(split) == [2]
