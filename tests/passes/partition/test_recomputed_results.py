"""The backward recomputes results of blocks, where that frees memory across their borders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.passes import PASSES, Kind
from autosplit.passes.analysis.boundary import boundaries, total_bytes
from autosplit.passes.analysis.operator_cost import duration
from autosplit.passes.graph import STATE, SUBGRAPH, calls, inputs
from autosplit.runtime.build import trace
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.options import SplitOptions
from tests.semantics.against_autograd import assert_equals_autograd

WIDTH, ROWS, BLOCKS = 384, 64, 4


class PostNorm(nn.Module):
    """A block that ends in a norm, as BERT's do."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.norm(x + self.down(self.activation(self.up(x))))
        return normalized


class Copying(PostNorm):
    """A block whose products read a copy of its input, as attention's do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.up(x.t().contiguous().t().contiguous()))
        normalized: Tensor = self.norm(x + self.down(y))
        return normalized


class Returning(nn.Sequential):
    """Reads the result of the last block, and returns it, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, x * x


def stack(block: Callable[[], nn.Module] = PostNorm) -> nn.Module:
    return nn.Sequential(*(block() for _ in range(BLOCKS)))


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def captured(model: nn.Module, **options: Any) -> SplitFunctions:
    return autosplit.split(model, **options).capture(batch())


@functools.cache
def captured_stack(block: type[PostNorm] = PostNorm) -> SplitFunctions:
    """Those of a stack with the default options, for tests that only read them."""
    return captured(stack(block))


def saved_bytes(functions: SplitFunctions) -> int:
    return total_bytes(boundaries(functions.graphs)[Kind.SAVED])


def recomputed(functions: SplitFunctions, graph: str = "backward_input") -> list[str]:
    """The results that a graph recomputes."""
    nodes = calls(functions.calling.graphs()[graph].graph)
    names = ((node.meta[SUBGRAPH].name, node) for node in nodes if SUBGRAPH in node.meta)
    return sorted(item.name for name, node in names if "recomputed" in name for item in node.users)


def time(functions: SplitFunctions) -> float:
    """The estimated time of F, I and W."""
    graphs = functions.graphs.graphs()
    halves = (graphs[name] for name in ("forward", "backward_input", "backward_weight"))
    return sum(duration(node) for module in halves for node in calls(module.graph))


@pytest.mark.parametrize("block", [PostNorm, Copying])
def test_stacks_save_what_they_save_as_one_graph(
    monkeypatch: pytest.MonkeyPatch, block: type[PostNorm]
) -> None:
    ours = captured_stack(block)
    monkeypatch.setenv("AUTOSPLIT_REGIONS", "0")
    whole = captured(stack(block))
    assert len(recomputed(ours)) >= BLOCKS - 1
    assert saved_bytes(ours) <= 1.01 * saved_bytes(whole)


@pytest.mark.parametrize("block", [PostNorm, Copying])
def test_gradients(block: type[PostNorm]) -> None:
    split = assert_equals_autograd(stack(block), [(batch(),), (batch(),)])
    assert recomputed(split.functions[-1])


def test_fast_recomputes_nothing() -> None:
    functions = captured(stack(), memory="fast")
    assert not recomputed(functions)
    assert saved_bytes(functions) > saved_bytes(captured_stack())


def test_some_of_equal_blocks_recompute() -> None:
    """The time suffices for the activations of the first blocks, but not for those of all."""
    model = stack(lambda: PostNorm(nn.GELU()))
    functions = captured(model)
    activations = [name for name in recomputed(functions) if "down_input" in name]
    assert activations == [f"_{at}_down_input" for at in range(len(activations))]
    assert 0 < len(activations) < BLOCKS
    assert time(functions) <= 1.02 * time(captured(model, memory="fast"))


def test_weight_gradients_read_no_parameters() -> None:
    functions = captured_stack()
    weight = functions.calling.backward_weight
    assert weight is not None
    assert not inputs(weight.graph, *STATE)
    assert not recomputed(functions, "backward_weight")


def test_returned_results_are_not_recomputed() -> None:
    functions = captured(Returning(*stack()))
    assert recomputed(functions) == [f"_{at}_output" for at in range(BLOCKS - 1)]


def test_sharded_blocks_are_not_gathered_for_it() -> None:
    gathering = mock.Mock(block=lambda name, call: call)
    arguments: Any = {"regions": True, "gathering": gathering}
    wrapped = tuple([dataclasses.replace(entry, run=partial(entry.run)) for entry in PASSES])
    for options in (SplitOptions(), SplitOptions(passes=wrapped)):
        assert not recomputed(trace(stack(), (batch(),), {}, options, **arguments))
