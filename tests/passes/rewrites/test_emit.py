"""Erasing a few nodes of a large graph looks at those only."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autosplit.passes.rewrites.emit import erase


def test_erasing_nodes_does_not_walk_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    chain = [graph.placeholder("x")]
    for _ in range(4):
        chain.append(graph.call_function(torch.neg, (chain[-1],)))
    graph.output(chain[2])
    monkeypatch.setattr(fx.Graph, "nodes", property(lambda _: pytest.fail("it was walked")))
    erase(graph, [chain[3], chain[1], chain[4]])
    monkeypatch.undo()
    assert [node.name for node in graph.nodes] == ["x", "neg", "neg_1", "output"]
