"""accumulate: gradients are added where they are made, and nowhere else."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.backends.backend import Eager
from autosplit.passes import SplitGraphs, run
from autosplit.passes.graph import inputs
from autosplit.passes.lowering.accumulate import accumulate
from autosplit.runtime.compiled_graph import compile_graph
from tests.passes.graphs import program_of
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
