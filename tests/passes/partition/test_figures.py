"""Bytes kept by small layers of the four families; nothing is timed."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.analysis.operator_cost import duration
from autosplit.passes.graph import Regions, SplitGraphs, calls
from autosplit.passes.memory_policy import BALANCED, FAST, LEAN, Memory
from autosplit.passes.partition.multiplier_search import (
    best_division,
    recompute_time,
    run_counts,
    waiting_share,
)
from autosplit.passes.partition.reachability import Reachability
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


def divided(graph: fx.Graph, memory: Memory) -> tuple[Regions, Reachability]:
    reach = Reachability.of(graph)
    return best_division(graph, reach, memory), reach


def held(graph: fx.Graph, memory: Memory) -> tuple[int, int]:
    """Bytes that F saves, and that I defers."""
    regions, _ = divided(graph, memory)
    return distinct_bytes(regions.saved), distinct_bytes(regions.deferred)


def test_fast_does_nothing_twice(graph: fx.Graph) -> None:
    result = divided(graph, FAST)
    assert (recompute_time(*result), waiting_share(*result)) == (0.0, 1.0)
    assert not any(duration(node) for node, count in run_counts(*result).items() if count > 1)


def test_balanced_holds_no_more_than_fast_and_defers_all(graph: fx.Graph) -> None:
    for fast, balanced in zip(held(graph, FAST), held(graph, BALANCED), strict=True):
        assert balanced <= fast
    result = divided(graph, BALANCED)
    assert waiting_share(*result) == 1.0
    assert recompute_time(*result) <= BALANCED.recompute * sum(map(duration, calls(graph)))


def test_lean_goes_below_with_over_half_of_the_work_left(graph: fx.Graph) -> None:
    assert held(graph, LEAN)[1] <= 0.65 * held(graph, FAST)[0]
    assert waiting_share(*divided(graph, LEAN)) >= 0.55
