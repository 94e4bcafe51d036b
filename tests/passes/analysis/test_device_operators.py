"""Operators that models meet only on a GPU, traced on shapes alone: none runs twice, and W has
the weight gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.passes import SplitGraphs, run
from autosplit.passes.graph import Kind
from tests.passes.graphs import names_out, ops, program_of

aten = torch.ops.aten
WIDTH, HEADS = 64, 4


class Attention(nn.Module):
    """Self-attention by one of the kernels that ``scaled_dot_product_attention`` takes on a GPU."""

    def __init__(self, kernel: str, dropout: float) -> None:
        super().__init__()
        self.kernel = kernel
        self.dropout = dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        results: Any
        if self.kernel == "flash":
            results = aten._scaled_dot_product_flash_attention(q, k, v, self.dropout, True)
        elif self.kernel == "efficient":
            results = aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, self.dropout, True
            )
        elif self.kernel == "cudnn":
            results = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, self.dropout, True
            )
        else:
            rows = (each.transpose(1, 2) for each in (q, k, v))
            rest = (None, None, length, length, self.dropout, True, False)
            return self.out(aten._flash_attention_forward(*rows, *rest)[0].reshape(x.shape))
        return self.out(results[0].transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(
    ("kernel", "dropout", "memory"),
    [
        ("flash", 0.0, "lean"),
        ("flash", 0.1, "balanced"),
        ("efficient", 0.1, "lean"),
        ("cudnn", 0.1, "balanced"),
        ("plain flash", 0.1, "balanced"),
    ],
)
def test_attention(kernel: str, dropout: float, memory: str) -> None:
    """Its backward makes dropout's mask again from the seed that its forward put out: though some
    are tagged as random, none draws.
    """
    model = Attention(kernel, dropout).bfloat16()
    graphs = _split(model, torch.randn(2, 16, WIDTH, dtype=torch.bfloat16), memory)
    name = f"_scaled_dot_product_{kernel}_attention"
    backward = f"{name}_backward"
    if kernel == "plain flash":
        name, backward = "_flash_attention_forward", "_flash_attention_backward"
    assert ops(graphs.forward)[name] == 1
    assert ops(graphs.backward_input)[name] == ops(graphs.backward_weight)[name] == 0
    assert ops(graphs.backward_input)[backward] == 1
    assert ops(graphs.backward_weight)[backward] == 0
    if memory == "balanced":
        assert ops(graphs.backward_weight)["mm"] == 2
        assert names_out(graphs.backward_weight, Kind.PARAMETER_GRAD) == [
            "qkv.weight",
            "qkv.bias",
            "out.weight",
            "out.bias",
        ]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        dropped = aten.native_dropout(self.up(x).tanh(), 0.1, True)
        return self.down(dropped[0])


class LstmCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cell, linear = self.cell, nn.functional.linear
        gates = linear(x[:, 0], cell.weight_ih), linear(x[:, 1], cell.weight_hh)
        hidden = aten._thnn_fused_lstm_cell(*gates, x[:, 2], cell.bias_ih, cell.bias_hh)
        return self.out(hidden[0])


@pytest.mark.parametrize(
    ("model", "shape", "forward", "products"),
    [
        (Dropping, (8, WIDTH), "native_dropout", 2),
        (LstmCell, (8, 3, WIDTH), "_thnn_fused_lstm_cell", 3),
    ],
)
def test_other_operators(
    model: type[nn.Module], shape: tuple[int, ...], forward: str, products: int
) -> None:
    graphs = _split(model(), torch.randn(shape), "balanced")
    assert ops(graphs.forward)[forward] == 1
    for backward in (graphs.backward_input, graphs.backward_weight):
        assert ops(backward)[forward] == 0
    assert ops(graphs.backward_weight)["mm"] == products


def _split(model: nn.Module, x: Tensor, memory: str) -> SplitGraphs:
    return run(program_of(model, x.requires_grad_()).joint, memory=memory)
