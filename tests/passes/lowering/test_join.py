"""join: W of several microbatches, whose products run once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.passes.lowering.join import joinable_count
from tests.passes.graphs import ops
from tests.zoo import CASES, Made, RepeatedLayer

from .weights import (
    MICROBATCHES,
    adding,
    assert_same_sums,
    joined,
    one_by_one,
    run,
    values_of,
    weight_graph,
)

ALL_ROWS = 10**9


def operators_of_joined(model: nn.Module, example: Tensor, rows: int = ALL_ROWS) -> dict[str, int]:
    """Join W of a module, compare its sums with the exact ones, and return its operators."""
    weight = weight_graph(model.double(), example)
    together = adding(joined(weight, rows), fuses="all")
    values = values_of(weight)
    assert_same_sums(run(together, values), one_by_one(adding(weight), values))
    return ops(together)


@pytest.mark.parametrize("name", ["transformer", "encoder_layer", "convolutions", "tied"])
def test_layers_of_all_kinds_have_the_same_sums(name: str) -> None:
    example = CASES[name].batch()
    example = example.double() if example.is_floating_point() else example
    products = {"transformer": 5, "encoder_layer": 4, "convolutions": 1, "tied": 2}
    assert operators_of_joined(CASES[name].build(), example)["addmm_"] == products[name]


def test_gradients_of_convolutions_with_few_positions_are_joined() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.SiLU(),
        nn.ConvTranspose2d(4, 2, 3, bias=False),
        nn.Conv2d(2, 2, 3, stride=2, groups=2),
    )
    example = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    few = operators_of_joined(model, example, rows=2 * 36)
    some = operators_of_joined(model, example, rows=2 * 36 - 1)
    assert few["convolution_backward"] == 3
    assert some["convolution_backward"] == 2 + MICROBATCHES


def test_products_of_many_rows_run_once_a_microbatch() -> None:
    example = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    few = operators_of_joined(RepeatedLayer(), example, rows=5)
    many = operators_of_joined(RepeatedLayer(), example, rows=4)
    assert (few["addmm_"], few["cat"]) == (3, 6)
    assert (many["addmm_"], many["cat"]) == (3 * MICROBATCHES, 0)


def test_equal_views_of_an_input_are_concatenated_once() -> None:
    heads = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    model = Made(lambda m, x: [head(x) for head in m.heads], heads=heads)
    example = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert operators_of_joined(model, example)["cat"] == 1 + len(heads)


def test_a_graph_without_small_products_gains_nothing() -> None:
    weight = weight_graph(nn.Linear(4, 4), torch.randn(8, 4, requires_grad=True))
    assert joinable_count(weight, rows=8) == 2  # the product, and the bias's sum
    assert joinable_count(weight, rows=7) == 0


class _AliveResults(TorchDispatchMode):
    """Number of an operator's results that are alive after each of its calls."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self._operator = operator
        self.results: list[Any] = []
        self.alive: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self._operator:
            tensor = result if isinstance(result, Tensor) else result[1]
            self.results.append(weakref.ref(tensor))
            self.alive.append(sum(one() is not None for one in self.results))
        return result


def test_factors_of_one_layer_are_alive_at_a_time() -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    example = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = weight_graph(layers.double(), example)
    together = adding(joined(weight, ALL_ROWS))
    with _AliveResults(torch.ops.aten.cat.default) as factors:
        run(together, values_of(weight))
    assert len(factors.alive) == 8
    assert max(factors.alive) == 2


def test_gradients_of_convolutions_beside_joined_products_are_freed_one_by_one() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).double()
    example = torch.randn(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    weight = weight_graph(model, example)
    together = adding(joined(weight, rows=3))
    with _AliveResults(torch.ops.aten.convolution_backward.default) as gradients:
        run(together, values_of(weight))
    assert len(gradients.alive) == MICROBATCHES
    assert max(gradients.alive) == 2
