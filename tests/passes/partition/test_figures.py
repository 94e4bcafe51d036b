"""What is held, on small layers of the four families: counted bytes, nothing timed."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autosplit.passes.graph import SplitGraphs
from autosplit.passes.memory_policy import BALANCED, FAST, LEAN
from autosplit.passes.partition.multiplier_search import memory_tradeoff
from autosplit.passes.rewrites.peephole import divide_backward_operators
from tests.passes.graphs import joint_of
from tests.zoo import Attention, SwiGLU


class Bottleneck(nn.Module):
    def __init__(self, outer: int = 32, inner: int = 8) -> None:
        super().__init__()
        sizes = [(outer, inner, 1), (inner, inner, 3), (inner, outer, 1)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, bias=False), nn.BatchNorm2d(o))
            for i, o, k in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = torch.relu(layer(y))
        return y + x


def joint(name: str) -> fx.GraphModule:
    x = torch.randn(4, 64, 64, requires_grad=True)
    match name:
        case "decoder":
            return joint_of(nn.Sequential(Attention(64, 2), SwiGLU(64, 176)), x)
        case "encoder":
            layer = nn.TransformerEncoderLayer(64, 2, 256, 0.0, "gelu", batch_first=True)
            return joint_of(layer, x)
    image = torch.randn(4, 32, 16, 16, requires_grad=True)
    return joint_of(nn.Sequential(Bottleneck(), Bottleneck()), image)


NAMES = ["decoder", "encoder", "convolutions"]


@pytest.fixture(scope="module", params=NAMES)
def graph(request: pytest.FixtureRequest) -> fx.Graph:
    module = joint(request.param)
    divide_backward_operators(SplitGraphs(module))
    return module.graph


def test_fast_does_nothing_twice(graph: fx.Graph) -> None:
    found = memory_tradeoff(graph, FAST)
    assert (found.recomputed, found.time, found.early_flops) == (0, 0.0, 0)


def test_balanced_holds_no_more_than_fast_and_defers_all(graph: fx.Graph) -> None:
    fast, balanced = memory_tradeoff(graph, FAST), memory_tradeoff(graph, BALANCED)
    assert balanced.saved <= fast.saved
    assert balanced.deferred <= fast.deferred
    assert balanced.early_flops == 0
    assert balanced.time <= BALANCED.recompute


def test_lean_goes_below_with_over_half_of_the_work_left(graph: fx.Graph) -> None:
    fast, lean = memory_tradeoff(graph, FAST), memory_tradeoff(graph, LEAN)
    assert lean.deferred <= 0.65 * fast.saved
    assert lean.late_flops >= 0.55 * (lean.early_flops + lean.late_flops)
