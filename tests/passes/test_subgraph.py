"""``inline``: constants of calling and called graphs, whatever their names."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from autosplit.passes.graph import Kind, Role, add_call, add_placeholder, set_outputs
from autosplit.passes.subgraph import Subgraph, call_subgraph, inline

ROOT = nn.Module()
ROOT.inner = nn.Module()
ROOT.inner.at = torch.tensor(2.0)
ROOT.block_inner_at = torch.tensor(3.0)


def added(graph: fx.Graph, value: fx.Node, constant: str) -> fx.Node:
    """Add ``value + constant``."""
    attribute = graph.create_node("get_attr", constant)
    attribute.meta["val"] = torch.zeros(())
    result = add_call(graph, torch.ops.aten.add.Tensor, value, attribute)
    result.meta["val"] = torch.zeros(())
    return result


def module_of(graph: fx.Graph, result: fx.Node) -> fx.GraphModule:
    set_outputs(graph, [(Role(Kind.OUTPUT, "y"), result)], {result: result})
    return fx.GraphModule(ROOT, graph)


def argument(graph: fx.Graph) -> fx.Node:
    return add_placeholder(graph, "x", torch.zeros(()), Role(Kind.INPUT, "x"))


def test_constants_of_caller_and_called_graph_keep_their_values() -> None:
    inner = fx.Graph()
    called = Subgraph.of("block", module_of(inner, added(inner, argument(inner), "inner.at")))
    outer = fx.Graph()
    value = added(outer, added(outer, argument(outer), "inner.at"), "block_inner_at")
    (value,) = call_subgraph(outer, called, [value], [torch.zeros(())])
    inlined = inline(module_of(outer, value))
    result: list[Tensor] = fx.Interpreter(inlined).run(torch.tensor(1.0))
    assert result[0].item() == 1 + 2 + 3 + 2
