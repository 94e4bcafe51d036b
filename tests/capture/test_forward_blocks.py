"""Blocks that are captured once for each kind give a forward the graph that it has without."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from autosplit.capture import forward_blocks
from autosplit.capture.forward_graph import CapturedForward, capture_forward
from autosplit.capture.module_paths import name_modules, stack
from autosplit.capture.region_session import SWITCH
from autosplit.passes.graph import source_line
from autosplit.torch_internals.pytree import tree_flatten
from tests.zoo import Made


class Layer(nn.Module):
    """Random numbers, autocast and ``no_grad`` inside, and a buffer that is written."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, tuple[Tensor, float]]:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(self.norm(x))
        with torch.no_grad():
            mean = y.mean()
        return x + self.dropout(y * scale).float(), (mean, 0.5)


class Writing(Layer):
    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, tuple[Tensor, float]]:
        return super().forward(x.add_(1), scale=scale)


class WithTensor(Layer):
    """Reads a tensor that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.rand(8)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, tuple[Tensor, float]]:
        return super().forward(x + self.shift, scale=scale)


class Passing(Layer):
    """Returns its input."""

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, tuple[Tensor, float]]:
        y, _ = super().forward(x, scale=scale)
        return y, (x, 0.5)


def run(model: Any, x: Tensor) -> Tensor:
    x, scale = model.first(x), x.detach().mean()
    for layer in model.layers:
        x, (mean, factor) = layer(x, scale=scale)
        x = x + factor * mean
    return x


def twice(model: Any, x: Tensor) -> Tensor:
    return run(model, run(model, x))


def of(*layers: nn.Module, forward: Any = run) -> nn.Module:
    return Made(forward, first=nn.Linear(8, 8), layers=nn.ModuleList(layers))


def operations(forward: CapturedForward, model: nn.Module) -> list[tuple[Any, ...]]:
    """All about the operations, except their names."""
    name_modules(forward.module, model)
    nodes = [node for node in forward.module.graph.nodes if node.op != "placeholder"]
    number = {node: at for at, node in enumerate(nodes)}

    def operand(node: fx.Node) -> Any:
        if node in forward.constants:
            return id(forward.constants[node])
        return number.get(node, forward.state.get(node, forward.inputs.get(node)))

    def layouts(node: fx.Node) -> list[Any]:
        leaves = tree_flatten(forward.effects[node].value)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]

    return [
        (
            str(node.target),
            str(map_arg((node.args, node.kwargs), operand)),
            stack(node),
            source_line(node),
            forward.effects[node].random,
            len(forward.effects[node].writes),
            layouts(node),
        )
        for node in nodes
    ]


@pytest.mark.parametrize(
    ("model", "traces"),
    [
        (of(Layer(), Layer(), Layer()), 2),
        (of(Layer(0.1), Layer(0.2), Layer(0.1)), 3),
        (of(Layer(), Layer(), forward=twice), 2),
        (of(Writing(), Writing()), 2),
    ],
    ids=["alike", "two kinds", "called twice", "writing"],
)
def test_blocks_are_traced_once_for_each_kind(
    model: nn.Module, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = mock.Mock(wraps=forward_blocks.export)
    monkeypatch.setattr(forward_blocks, "export", count)
    copied = operations(capture_forward(model, (torch.randn(4, 8),), {}), model)
    assert count.call_count == traces
    monkeypatch.setenv(SWITCH, "0")
    assert copied == operations(capture_forward(model, (torch.randn(4, 8),), {}), model)
    assert count.call_count == traces


@pytest.mark.parametrize("kind", [WithTensor, Passing])
def test_blocks_that_cannot_be_copied_are_traced_with_their_model(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = of(kind(), kind())
    copied = operations(capture_forward(model, (torch.randn(4, 8),), {}), model)
    monkeypatch.setenv(SWITCH, "0")
    assert copied == operations(capture_forward(model, (torch.randn(4, 8),), {}), model)
