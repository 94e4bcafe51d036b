"""A forward that is asked to unroll a long loop is told that it is compiled, not exported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit.capture.workarounds import dynamo as long_loops
from tests.semantics.against_autograd import assert_equals_autograd, within


class Scan(nn.Module):
    """As transformers' Mamba: a loop, and for compilers a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return x.cumsum(1)
        total, sums = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            total = total + x[:, step]
            sums.append(total)
        return torch.stack(sums, 1)


def operators(module: nn.Module, x: Tensor) -> set[str]:
    """Of the captured graph; gradients are those of eager mode, which runs the loop."""
    model = assert_equals_autograd(module, [(x.requires_grad_(),)], compare=within(1e-5))
    (functions,) = model.functions
    return {str(node.target) for node in functions.graphs.forward.graph.nodes}


def test_a_short_loop_is_unrolled() -> None:
    assert "aten.cumsum.default" not in operators(Scan(), torch.randn(2, 8, 3))


def test_a_long_loop_gives_way_to_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_loops, "LIMIT", 20)
    assert "aten.cumsum.default" in operators(Scan(), torch.randn(2, 24, 3))


def test_a_long_loop_without_a_closed_form_is_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop(Scan):
        def forward(self, x: Tensor) -> Tensor:
            total = x[:, 0] @ self.weight
            for step in range(1, x.shape[1]):
                total = total.tanh() + x[:, step]
            return total

    monkeypatch.setattr(long_loops, "LIMIT", 20)
    assert "aten.tanh.default" in operators(Loop(), torch.randn(2, 24, 3))
