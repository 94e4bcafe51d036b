"""extract: a subgraph with its live-ins first, each value computed when it is first read."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx, nn

from autosplit.passes import Kind, Role
from autosplit.passes.partition.extract import extract

aten = torch.ops.aten
RESULT = Role(Kind.PARAMETER_GRAD, "w")
SAVED = Role(Kind.SAVED, "b")


class Chain:
    """``a = -x``, ``b = |a|``, ``c = exp(x)``, ``d = b * c``."""

    def __init__(self) -> None:
        graph = fx.Graph()
        self.x = graph.placeholder("x")
        self.x.meta["role"] = Role(Kind.INPUT, "x")
        call = "call_function"
        self.a = graph.create_node(call, aten.neg.default, (self.x,), name="a")
        self.b = graph.create_node(call, aten.abs.default, (self.a,), name="b")
        self.c = graph.create_node(call, aten.exp.default, (self.x,), name="c")
        self.d = graph.create_node(call, aten.mul.Tensor, (self.b, self.c), name="d")
        graph.output([self.d])
        for node in (self.x, self.a, self.b, self.c, self.d):
            node.meta["val"] = torch.empty(3, device="meta")
        self.module = fx.GraphModule(nn.Module(), graph)

    def part(
        self,
        compute: Collection[fx.Node],
        carried: Collection[fx.Node] = (),
        on_demand: Collection[fx.Node] = (),
        result: object = None,
    ) -> fx.GraphModule:
        found = extract(
            self.module,
            "part",
            carried=[(Role(Kind.SAVED, node.name), node) for node in carried],
            compute=set(compute),
            returns=[(RESULT, result or self.d)],
            on_demand=on_demand,
        )
        found.graph.lint()
        return found


def names(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes]


def test_recomputed_values_run_just_before_their_first_reader() -> None:
    g = Chain()
    part = g.part([g.x, g.a, g.b, g.c, g.d], on_demand=[g.a, g.b])
    assert names(part) == ["x", "c", "a", "b", "d", "output"]


def test_items_follow_what_makes_them_though_they_are_read_later() -> None:
    """A tuple that waits for the reader of its last item would keep all of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["role"] = Role(Kind.INPUT, "x")
    call = "call_function"
    pair = graph.create_node(call, aten.aminmax.default, (x,), name="pair")
    low = graph.create_node(call, operator.getitem, (pair, 0), name="low")
    high = graph.create_node(call, operator.getitem, (pair, 1), name="high")
    other = graph.create_node(call, aten.exp.default, (low,), name="other")
    graph.output([other, high])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    part = extract(
        fx.GraphModule(nn.Module(), graph),
        "part",
        carried=[],
        compute={x, pair, low, high, other},
        returns=[(RESULT, other), (SAVED, high)],
        on_demand=[pair, low, high],
    )
    assert names(part) == ["x", "pair", "low", "high", "other", "output"]
