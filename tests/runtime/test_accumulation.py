"""``accumulation=``: sums of weight gradients by fused and joined products."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError, Stage
from autosplit.passes.subgraph import inner_calls
from autosplit.runtime import compiled_graph
from autosplit.runtime.accumulation import MOST_JOINED
from tests.zoo import Residual

COUNT = 4
TOLERANCE = 1e-12
"""Of gradients in float64, relative to the largest element of each."""

Gradients = Mapping[str, Tensor]


@pytest.fixture(autouse=True)
def _graphs_add_small_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs add gradients themselves, although all of a model of a test are small."""
    monkeypatch.setattr(compiled_graph, "_SMALL", 0)


class Blocks(nn.Module):
    """Repeated blocks, which are captured once, around a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.table(tokens)) @ self.table.weight.t()


def microbatches(count: int = COUNT, length: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and gradients of the outputs of ``Blocks``."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens = torch.randint(0, 7, (2, length), generator=generator)
        yield tokens, torch.randn(2, length, 7, generator=generator, dtype=torch.float64)


def build_stage(accumulation: str | int) -> Stage:
    torch.manual_seed(0)
    example, _ = next(microbatches())
    return Stage(Blocks().double(), [example], accumulation=accumulation)


_built = functools.cache(build_stage)


def blocks_stage(accumulation: str | int = "exact") -> Stage:
    """One stage for all tests of an accumulation, without sums."""
    stage = _built(accumulation)
    stage.reset()
    return stage


def step(stage: Stage, count: int = COUNT) -> Gradients:
    """The sums after I of all microbatches, and then W of all in one call."""
    for at, (tokens, grad) in enumerate(microbatches(count)):
        stage.forward(at, [tokens])
        stage.backward_input(at, [grad])
    stage.backward_weight(*range(count))
    return stage.gradients


@functools.cache
def exact_sums(count: int = COUNT) -> Gradients:
    return {name: total.clone() for name, total in step(blocks_stage(), count).items()}


def assert_close(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        allowed = TOLERANCE * float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, rtol=0.0, atol=allowed)


@pytest.mark.parametrize("accumulation", ["fused", "joined", "auto", 3])
def test_sums_equal_the_exact_ones_within_rounding(accumulation: str | int) -> None:
    actual = {name: total.clone() for name, total in step(blocks_stage(accumulation)).items()}
    assert_close(step(blocks_stage(accumulation)), actual)
    assert_close(actual, exact_sums())


def test_later_microbatches_add_to_the_sums() -> None:
    stage = blocks_stage("auto")
    for _ in range(2):
        step(stage)
    assert_close(stage.gradients, {name: 2 * total for name, total in exact_sums().items()})


def test_exact_sums_of_one_call_have_the_bits_of_single_calls() -> None:
    expected, single = exact_sums(), blocks_stage()
    for at, (tokens, grad) in enumerate(microbatches()):
        single.forward(at, [tokens])
        single.backward_input(at, [grad])
        single.backward_weight(at)
    assert all(torch.equal(expected[n], g) for n, g in single.gradients.items())


@pytest.mark.parametrize(
    ("accumulation", "count", "products"),
    [
        ("exact", 1, {"mm": 5, "addmm_": 0, "cat": 0, "index_add_": 0}),
        ("fused", 1, {"mm": 0, "addmm_": 5, "cat": 0, "index_add_": 1}),
        ("joined", COUNT, {"mm": 0, "addmm_": 5, "cat": 10, "index_add_": 0}),
        ("auto", COUNT, {"mm": 0, "addmm_": 5, "cat": 10, "index_add_": COUNT}),
        (3, COUNT, {"mm": 0, "addmm_": 5 * COUNT, "cat": 0, "index_add_": COUNT}),
    ],
)
def test_operators_of_each_accumulation(
    accumulation: str | int, count: int, products: dict[str, int]
) -> None:
    stage = blocks_stage(accumulation)
    graph = stage.functions.backward_graphs.weight.source(None, adds=True, count=count).graph
    operators = Counter(str(node.target).split(".")[1] for node in inner_calls(graph))
    assert {name: operators[name] for name in products} == products


def test_small_gradients_of_few_products_are_added_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each gradient that is no product's would need a call of its own."""
    monkeypatch.undo()
    x = torch.randn(1, 3, 16, 16, requires_grad=True)
    convolutions = [nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) for _ in range(2)]
    few = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(432, 2))
    most = nn.Sequential(nn.Flatten(), nn.Linear(768, 2), nn.Linear(2, 2))
    called = {}
    for name, model in {"few": few, "most": most}.items():
        weight = Stage(model, [x], accumulation="auto").functions.backward_graphs.weight
        graph = weight.source(None, adds=True).graph
        products = graph.find_nodes(op="call_function", target=torch.ops.aten.addmm_.default)
        called[name] = weight.most_joined(None), len(products)
    assert called == {"few": (1, 0), "most": (MOST_JOINED, 2)}


def test_long_runs_are_several_calls() -> None:
    count = MOST_JOINED + 3
    assert_close(step(blocks_stage("joined"), count), exact_sums(count))


def gradients_of_split(**options: Any) -> Gradients:
    """``.grad`` after two steps of microbatches that are pending together."""
    torch.manual_seed(0)
    model = autosplit.split(Blocks().double(), max_pending=math.inf, **options)
    for _ in range(2):
        for tokens, grad in microbatches():
            model(tokens).backward(grad)
        model.backward_weight()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_pending_microbatches_of_a_split_module_are_summed() -> None:
    doubled = {name: 2 * total for name, total in exact_sums().items()}
    assert_close(gradients_of_split(accumulation="auto"), doubled)


def test_convolutions_of_open_sizes_are_joined() -> None:
    def gradients_after(model: nn.Module) -> Gradients:
        for length in (5, 6, 6, 7, 7):
            model(torch.ones(1, 3, length, dtype=torch.float64).cumsum(2)).sum().backward()
        return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 3, 1)).double()
    expected = gradients_after(plain)
    plain.zero_grad()
    model = autosplit.split(plain, accumulation="joined", max_pending=math.inf)
    assert_close(gradients_after(model), expected)
    assert any(graph.backward_graphs.weight.most_joined(None) > 1 for graph in model.functions)


@pytest.mark.parametrize("accumulation", ["fused", "joined"])
def test_products_beside_a_sparse_gradient(accumulation: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)).double()
    tokens = torch.tensor([[0, 5, 5]])
    for _ in range(2):
        model(tokens).sum().backward()
    stage = Stage(model, [tokens], accumulation=accumulation)
    for at in range(2):
        stage.forward(at, [tokens])
        stage.backward_input(at, [torch.ones(1, 3, 2, dtype=torch.float64)])
    stage.backward_weight(0, 1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stage.gradients[name].to_dense(), parameter.grad.to_dense())  # type: ignore[union-attr]


def test_hooks_see_the_gradient_of_each_microbatch() -> None:
    stage = build_stage("auto")
    seen: list[Tensor] = []
    stage.module.table.weight.register_hook(seen.append)  # type: ignore[union-attr,arg-type]
    step(stage)
    assert len(seen) == COUNT


def test_unknown_accumulation_lists_the_known_ones() -> None:
    with pytest.raises(SplitError, match="'exact', 'fused', 'joined', 'auto', or a number of rows"):
        Stage(nn.Linear(2, 2), [torch.randn(3, 2)], accumulation="sloppy")
    with pytest.raises(SplitError, match="unknown accumulation -1"):
        Stage(nn.Linear(2, 2), [torch.randn(3, 2)], accumulation=-1)
