"""Linear layers are one call in generated code, with the bits of the operators that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from autosplit.passes.graph import inputs
from autosplit.passes.lowering import codegen
from tests.passes.graphs import split

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class Products(nn.Module):
    """Applies a function to each input, a weight and a bias."""

    def __init__(self, *forwards: Forward, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(7, dtype=dtype))
        self.forwards = forwards

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [apply(x, self.weight, self.bias) for apply in self.forwards for x in inputs]


def run_forward(module: nn.Module, inputs_of_module: Sequence[Tensor]) -> tuple[list[Tensor], str]:
    """The outputs of the generated forward, and its source."""
    graph = split(module, *(x.detach().requires_grad_() for x in inputs_of_module)).forward
    source = codegen.generate("forward", graph)
    space: dict[str, Any] = {}
    exec(codegen.HEADER + source, space)
    values = dict(module.named_parameters())
    values |= {f"args[{at}]": x for at, x in enumerate(inputs_of_module)}
    with torch.no_grad():
        return space["forward"]([values[role.name] for role in inputs(graph.graph)]), source


INPUTS = {
    "matrix": torch.randn(5, 6),
    "no rows": torch.randn(0, 6),
    "transposed matrix": torch.randn(6, 5).t(),
    "vector": torch.randn(6),
    "batch": torch.randn(2, 5, 6),
    "batch of one": torch.randn(1, 5, 6),
    "batch of nothing": torch.randn(0, 5, 6),
    "transposed batch": torch.randn(5, 2, 6).transpose(0, 1),
    "sliced batch": torch.randn(2, 5, 9)[..., :6],
    "images": torch.randn(2, 3, 5, 6),
    "permuted images": torch.randn(2, 6, 3, 5).permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_of_linear_layers(dtype: torch.dtype) -> None:
    module = Products(linear, lambda x, w, b: linear(x, w), dtype=dtype)
    examples = [x.to(dtype) for x in INPUTS.values()]
    results, source = run_forward(module, examples)
    for result, expected in zip(results, module(*examples), strict=False):  # then saved tensors
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    assert "aten.t.default" not in source


@pytest.mark.parametrize("kind", ["matrix", "batch", "batch of one", "images"])
def test_a_layer_is_one_call(kind: str) -> None:
    _, source = run_forward(Products(linear), [INPUTS[kind]])
    (call,) = [line for line in source.splitlines() if "aten." in line]
    assert "aten.linear.default(args_0, weight, bias); del " in call


addmm = torch.addmm
OTHERS: tuple[Forward, ...] = (
    lambda x, w, b: addmm(b, x, w.t(), beta=2),
    lambda x, w, b: addmm(b.expand(5, 7), x, w.t()),
    lambda x, w, b: addmm(b, x, (t := w.t())) + t.sum(),
    lambda x, w, b: (t := w[:6].t()) @ t + x[:1],
)


def test_other_products_stay() -> None:
    module, x = Products(*OTHERS), torch.randn(5, 6)
    results, source = run_forward(module, [x])
    assert "aten.linear" not in source
    assert all(map(torch.equal, results, module(x)))


SHAPED: tuple[Forward, ...] = (
    lambda x, w, b: addmm(b, x.view(10, 6), w.t()).view(5, 2, 7),
    lambda x, w, b: addmm(b, rows := x.view(10, 6), w.t()).view(2, 5, 7) + rows.sum(),
    lambda x, w, b: (y := addmm(b, x.view(10, 6), w.t())).view(2, 5, 7) + y.sum(),
    lambda x, w, b: addmm(b, x.view(2, 5, 3, 2).view(10, 6), w.t()).view(2, 5, 7),
    lambda x, w, b: addmm(b, x.view(2, 30)[:, :6], w.t()).view(2, 1, 7),
)


def test_shapes_that_linear_does_not_return_stay() -> None:
    module, x = Products(*SHAPED), torch.randn(2, 5, 6)
    results, source = run_forward(module, [x])
    assert source.count("aten.linear") == len(SHAPED)
    assert source.count("aten.reshape") >= 2 * len(SHAPED) - 1
    assert all(map(torch.equal, results, module(x)))
