"""NaN in gradients under ``torch.autograd.detect_anomaly()``: the operator that made the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.errors import AnomalyError
from autosplit.passes.graph import GRADIENT, Role, inputs, source_line
from autosplit.passes.subgraph import inline


def copied(values: Iterable[Any]) -> list[Any]:
    """Copies of the arguments of a graph, which may write over its own."""
    return [each.clone() if isinstance(each, Tensor) else each for each in values]


def refuse_nan(
    name: str,
    results: Iterable[tuple[Role, Any]],
    module: fx.GraphModule,
    given: Mapping[Role, Any] | None,
) -> None:
    """Check the gradients that a graph returned.

    Args:
        name: of the graph.
        results: what it returned, or added into.
        module: the graph.
        given: its arguments; None: the operator is not looked for.

    Raises:
        AnomalyError: one has a NaN; names it, the operator that made it first, and its line.
    """
    for role, value in results:
        if role.kind in GRADIENT and _has_nan(value):
            origin = "" if given is None else _origin(inline(module), given)
            raise AnomalyError(f"{name} returned nan values in the gradient of {role.name}{origin}")


def _origin(module: fx.GraphModule, given: Mapping[Role, Any]) -> str:
    """The first operator that makes a NaN out of operands without one, in words; else where NaN
    come in.
    """
    search = _Search(module)
    search.run(*[given[role] for role in inputs(module.graph)])
    found = search.found
    node = next((n for n in found if found.keys().isdisjoint(n.all_input_nodes)), None)
    if node is None:
        return ""
    reader = node if node.op == "call_function" else next(iter(node.users), node)
    line = source_line(reader)
    what = f"{node.target} makes" if reader is node else f"{reader.target} is given"
    return f": {what} the first" + (f", for {line}" if line else "")


class _Search(fx.Interpreter):
    """Runs a graph and notes which nodes' values have a NaN."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, None] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        values: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
        if n.op != "output" and any(map(_has_nan, values)):
            self.found[n] = None
        return value


def _has_nan(value: Any) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    dense = value.coalesce().values() if value.is_sparse else value
    return dense.dtype.itemsize > 1 and bool(torch.isnan(dense).any())
