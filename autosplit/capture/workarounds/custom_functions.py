"""Refusal of custom autograd functions that Dynamo traces wrongly."""

from __future__ import annotations

from collections.abc import Collection
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.autograd.function import FunctionCtx

from autosplit.errors import CaptureError
from autosplit.passes.graph import source_line

_APPLY = torch.ops.higher_order.autograd_function_apply
_UNMATERIALISED = FunctionCtx.set_materialize_grads.__code__


def refuse_absent_gradients(module: fx.GraphModule, traced: Collection[CodeType]) -> None:
    """Refuse functions that ask for None in place of gradients that do not exist: Dynamo traces
    their backward with a gradient for every output, and the branch for None is lost.

    Args:
        module: what Dynamo made.
        traced: the code that it went through.

    Raises:
        CaptureError: a gradient may be absent where the function is used; names the line.
    """
    if _UNMATERIALISED not in traced:
        return
    applied = _calls(module)
    if any(_has_several_outputs(node) or _returns_none(node) for node in applied):
        line = next(filter(None, map(source_line, applied)), "a custom autograd function")
        raise CaptureError(
            f"ctx.set_materialize_grads(False), at {line}: a graph would hand the backward zeros "
            "where autograd hands it None. Leave it out if zeros will do; or call the function "
            "from a method decorated with torch.compiler.disable, around which a model is split "
            "in parts (without fullgraph=True or a memory setting)"
        )


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.target is _APPLY]


def _has_several_outputs(node: fx.Node) -> bool:
    """A loss may leave one of them out."""
    results = node.meta.get("example_value")
    constant = node.kwargs.get("non_differentiable_idx", ())
    return not isinstance(results, (tuple, list)) or len(results) - len(_list(constant)) > 1


def _returns_none(node: fx.Node) -> bool:
    """The backward may hand None to the function whose result this one takes."""
    body = getattr(node.graph.owning_module, str(getattr(node.args[1], "target", "")), None)
    return body is None or None in _list(body.graph.output_node().args[0])


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
