"""What operators cost, and which graph makes the products of weight gradients."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autosplit
from autosplit.passes import Role
from autosplit.passes.analysis.aliasing import storage_bytes
from autosplit.passes.analysis.operator_cost import flops, weight_flops
from autosplit.passes.graph import Kind, calls, concrete, with_concrete_sizes

# --- Symbolic sizes are priced by their example and cross a boundary as numbers -------------------


def symbolic(function: object, *args: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="symbolic")(*args)
    for index, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        node.meta["role"] = Role(Kind.INPUT, f"in{index}")
    return module


def test_prices_come_from_the_example() -> None:
    module = symbolic(lambda a, b: (a @ b).relu(), torch.randn(5, 7), torch.randn(7, 9))
    product = next(node for node in calls(module.graph) if "mm" in str(node.target))
    assert flops(product) == 2 * 5 * 7 * 9
    assert storage_bytes(product) == 4 * 5 * 9
    rows = product.meta["val"].shape[0]
    assert isinstance(rows, torch.SymInt)
    assert concrete(rows) == 5
    assert with_concrete_sizes(product.meta["val"]).shape == (5, 9)


# --- weight_flops: which graph makes the products of weight gradients -----------------------------


PRODUCT = 2 * 3 * 4 * 4


def found(model: nn.Module, **options: object) -> tuple[int, int]:
    split = autosplit.split(model, **options)
    split(torch.randn(3, 4, requires_grad=True)).sum().backward()
    return weight_flops(split.functions[-1].graphs)


def test_products_wait() -> None:
    assert found(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))) == (2 * PRODUCT, 0)


def test_what_a_budget_has_i_do_is_counted_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    waiting, early = found(model, memory=1)
    assert waiting + early == 2 * PRODUCT
    assert early > 0


def test_a_convolution() -> None:
    split = autosplit.split(nn.Conv2d(2, 3, 3))
    split(torch.randn(1, 2, 5, 5, requires_grad=True)).sum().backward()
    assert weight_flops(split.functions[-1].graphs) == (2 * 3 * 3 * 2 * 3 * 3 * 3, 0)
