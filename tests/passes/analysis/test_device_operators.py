"""Operators that models meet only on a GPU, traced on shapes alone: none runs twice, and W has
the weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.passes import SplitGraphs, run
from autosplit.passes.graph import Kind
from tests.passes.graphs import names_out, ops, program_of
from tests.zoo import Made

aten = torch.ops.aten
WIDTH, HEADS = 64, 4


KERNELS: dict[str, Callable[..., Any]] = {
    "flash": lambda q, k, v, p: aten._scaled_dot_product_flash_attention(q, k, v, p, True),
    "efficient": lambda q, k, v, p: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, p, True
    ),
    "cudnn": lambda q, k, v, p: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, p, True
    ),
}


def plain_flash(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> list[Tensor]:
    rows, length = (item.transpose(1, 2) for item in (q, k, v)), q.shape[2]
    built = aten._flash_attention_forward(*rows, None, None, length, length, dropout, True, False)
    return [built[0].transpose(1, 2)]


def attention(kernel: str, dropout: float) -> nn.Module:
    """Self-attention by one of the kernels that ``scaled_dot_product_attention`` takes on a GPU."""

    def make(m: nn.Module, x: Tensor) -> Tensor:
        heads = m.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        built = KERNELS.get(kernel, plain_flash)(*heads.unbind(0), dropout)[0]
        return m.out(built.transpose(1, 2).reshape(x.shape))

    return Made(make, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))


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
    model = attention(kernel, dropout).bfloat16()
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


def _split(model: nn.Module, x: Tensor, memory: str) -> SplitGraphs:
    return run(program_of(model, x.requires_grad_()).joint, memory=memory)
