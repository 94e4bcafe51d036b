"""``foresee``: what tracing will find that a module returns, from Dynamo's graph of it."""

from __future__ import annotations

from typing import Any

from torch import fx

from autosplit.capture.cache.fingerprint import traced_value
from autosplit.capture.cache.split_graph_cache import PredictedResults
from autosplit.torch_internals.pytree import flatten_named, tree_flatten

from .pytree_objects import hold


def foresee(
    exported: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PredictedResults:
    """Predict the results that tracing will find.

    Raises:
        Exception: what the user's classes raise for tensors without data.
    """
    codegen: Any = exported.graph._codegen
    outputs: Any = exported.graph.output_node().args[0]
    values = [traced_value(node) if isinstance(node, fx.Node) else node for node in outputs]
    tree = hold(codegen.dynamo_bytecode_unflatten(values, (*args, *kwargs.values())))
    leaves, spec = tree_flatten(tree)
    return PredictedResults(tuple(name for name, _ in flatten_named("output", tree)), leaves, spec)
