"""The page on meshes: what it says of its rows, and the bound beside them."""

from __future__ import annotations

import torch
from torch import fx

from benchmarks.mesh import collectives

_EXCHANGE = torch.ops._c10d_functional


def test_least_exposed_time_follows_from_dependences() -> None:
    """One collective between two operators, and a third operator beside it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    earlier, beside_it = (graph.call_function(torch.relu, (x,)) for _ in range(2))
    start = graph.call_function(_EXCHANGE.all_reduce.default, (earlier, "sum", "0"))
    wait = graph.call_function(_EXCHANGE.wait_tensor.default, (start,))
    after = graph.call_function(torch.relu, (wait,))
    nodes = [earlier, start, wait, after, beside_it]
    for length, expected in ((1.0, 2.0), (3.0, 0.0), (9.0, 0.0)):
        seconds = {earlier: 1.0, start: 5.0, wait: 5.0, after: 1.0, beside_it: length}
        assert collectives.least_exposed(nodes, seconds, delay=3.0) == expected
