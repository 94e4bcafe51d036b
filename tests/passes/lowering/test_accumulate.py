"""accumulate: gradients are added where they are made, and nowhere else."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.backends.eager import Eager
from autosplit.passes import SplitGraphs, run
from autosplit.passes.analysis.aliasing import is_view
from autosplit.passes.graph import Kind, calls, inputs, outputs
from autosplit.passes.lowering.accumulate import accumulate
from autosplit.passes.verify import verify_graph
from autosplit.runtime.compiled_graph import compile_graph
from tests.passes.graphs import names_in, ops, program_of
from tests.zoo import CASES

aten = torch.ops.aten


def split(name: str) -> SplitGraphs:
    case = CASES[name]
    batch = case.batch()
    return run(program_of(case.build(), batch.requires_grad_(batch.is_floating_point())).joint)


def weight(name: str) -> fx.GraphModule:
    module = split(name).backward_weight
    assert module is not None
    return module


@pytest.mark.parametrize("name", ["transformer", "tied", "convolutions", "plain_parameters"])
def test_every_gradient_has_an_accumulator(name: str) -> None:
    plain = weight(name)
    module = accumulate(plain)
    verify_graph("backward_weight_accumulating", module, "accumulate")
    gradients = [role.name for role, _ in outputs(plain.graph)]
    assert names_in(module, Kind.ACCUMULATOR) == gradients
    assert outputs(module.graph) == []
    assert ops(module) - ops(plain) == {"add_": len(gradients)}
    assert ops(plain) - ops(module) == {}


def test_unsplit_backward_still_returns_input_gradients() -> None:
    plain = split("mlp").backward
    assert plain is not None
    module = accumulate(plain)
    verify_graph("backward_accumulating", module, "accumulate")
    assert [role.kind for role, _ in outputs(module.graph)] == [Kind.INPUT_GRAD]


def test_added_as_soon_as_it_is_made() -> None:
    """Also where the graph takes the view that is the gradient only much later."""
    nodes = list(calls(accumulate(weight("attention")).graph))
    work = [node.target for node in nodes if not is_view(node)]
    mm, add, total = aten.mm.default, aten.add_.Tensor, aten.sum.dim_IntList
    assert work == [add, add, mm, add, mm, add, total, add]


class _AliveProducts(TorchDispatchMode):
    """How many results of matrix products are alive at each addition."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.alive: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add_.Tensor:
            self.alive.append(sum(ref() is not None for ref in self.made))
        result = func(*args, **(kwargs or {}))
        if func is aten.mm.default:
            self.made.append(weakref.ref(result))
        return result


def test_gradients_die_at_once() -> None:
    module = accumulate(weight("transformer"))
    args = [torch.randn(node.meta["val"].shape) for node in inputs(module.graph).values()]
    with _AliveProducts() as products:
        assert compile_graph("backward_weight", module, Eager()).call(args) == []
    assert len(products.made) == 5
    assert max(products.alive) == 1


def test_accumulators_of_another_dtype() -> None:
    module = accumulate(weight("bfloat16"), torch.float32)
    values = [node.meta["val"].dtype for node in inputs(module.graph, Kind.ACCUMULATOR).values()]
    assert set(values) == {torch.float32}
