"""NaN in gradients under ``torch.autograd.detect_anomaly()``: find the first operator with one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.errors import AnomalyError
from autosplit.passes.graph import GRADIENT, Role, inputs, source_line
from autosplit.passes.subgraph import inline


def copied(values: Iterable[Any]) -> list[Any]:
    """Copies of a graph's arguments, made before the graph may overwrite them."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def refuse_nan(
    name: str,
    results: Iterable[tuple[Role, Any]],
    module: fx.GraphModule,
    arguments: Mapping[Role, Any] | None,
) -> None:
    """Refuse NaN in the gradients that a graph returned.

    Args:
        name: the graph's name.
        results: (role, value) of each result of the graph. For a gradient that was added into a
            sum, the value is the sum.
        module: the graph.
        arguments: copies of the graph's arguments, from which the graph runs again to find the
            operator; None: do not search for the operator.

    Raises:
        AnomalyError: a gradient has a NaN; names the gradient, the first operator with a NaN, and
            the operator's line.
    """
    for role, value in results:
        if role.kind in GRADIENT and _has_nan(value):
            origin = "" if arguments is None else _origin(inline(module), arguments)
            raise AnomalyError(f"{name} returned nan values in the gradient of {role.name}{origin}")


def _origin(module: fx.GraphModule, arguments: Mapping[Role, Any]) -> str:
    """A phrase that names the first operator whose result has a NaN and whose operands have none.
    Without such an operator, the phrase names the first one that reads an argument with a NaN.
    """
    search = _AnomalySearch(module)
    search.run(*[arguments[role] for role in inputs(module.graph)])
    nodes = search.nan_nodes
    for node in nodes:
        # An argument may only be passed on to a later graph.
        readers = [node] if node.op == "call_function" else [*node.users]
        reader = next((n for n in readers if n.op == "call_function"), None)
        if reader is not None and nodes.keys().isdisjoint(node.all_input_nodes):
            line = source_line(reader)
            event = "makes" if reader is node else "is given"
            return f": {reader.target} {event} the first" + (f", for {line}" if line else "")
    return ""


class _AnomalySearch(fx.Interpreter):
    """Runs a graph and records the nodes whose values have a NaN."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.nan_nodes: dict[fx.Node, None] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        values: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
        if n.op != "output" and any(map(_has_nan, values)):
            self.nan_nodes[n] = None
        return value


def _has_nan(value: Any) -> bool:
    """Whether a value is a tensor with a NaN; False for dtypes of one byte."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    dense = value.coalesce().values() if value.is_sparse else value
    return dense.dtype.itemsize > 1 and bool(torch.isnan(dense).any())
