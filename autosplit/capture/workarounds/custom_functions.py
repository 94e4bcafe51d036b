"""Custom autograd functions in Dynamo's graphs: refused, fixed, or made traceable again.

Dynamo records such a function as a higher-order operator with a forward and a backward graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.utils import (
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from torch.autograd.function import FunctionCtx

from autosplit.errors import CaptureError
from autosplit.passes.graph import source_line
from autosplit.torch_internals.dynamo import all_nodes, source_name, traced_value

_NUMPY = numpy_to_tensor_wrapper, numpy_method_wrapper, numpy_operator_wrapper
_APPLY = torch.ops.higher_order.autograd_function_apply
_UNMATERIALISED = FunctionCtx.set_materialize_grads.__code__


def refuse_absent_gradients(module: fx.GraphModule, traced: Collection[CodeType]) -> None:
    """Refuse custom autograd functions that expect None for absent gradients.

    Dynamo traces the backward of a function with a gradient for every output. So the graph lacks
    the function's code for None.

    Args:
        module: Dynamo's graph.
        traced: code objects that Dynamo traced through.

    Raises:
        CaptureError: a function asks for None, and the gradient of one of its outputs may be
            absent; names the line that calls the function.
    """
    if _UNMATERIALISED not in traced:
        return
    unsafe = [node for node in _calls(module) if _has_several_outputs(node) or _returns_none(node)]
    if unsafe:
        line = next(filter(None, map(source_line, unsafe)), "a custom autograd function")
        raise CaptureError(
            f"ctx.set_materialize_grads(False), at {line}: a graph would pass zeros to a backward "
            "where autograd passes None. Remove the call if zeros are fine. Otherwise call the "
            "function from a method decorated with torch.compiler.disable. The method is then a "
            "graph break, which fullgraph=True and memory settings do not allow"
        )


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in all_nodes(module) if node.target is _APPLY]


def _has_several_outputs(node: fx.Node) -> bool:
    """Whether a custom function has several differentiable outputs, so that a loss may leave some
    unused.
    """
    results = traced_value(node)
    constant = node.kwargs.get("non_differentiable_idx", ())
    return not isinstance(results, (tuple, list)) or len(results) - len(_list(constant)) > 1


def _returns_none(node: fx.Node) -> bool:
    """Whether a custom function's backward may return None as the gradient of an input."""
    body = _body(node, 1)
    return body is None or None in _list(body.graph.output_node().args[0])


def _body(node: fx.Node, at: int) -> Any:
    """The graph of a custom function's forward (``at=0``) or backward (``at=1``), or None."""
    return getattr(node.graph.owning_module, str(getattr(node.args[at], "target", "")), None)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def return_tensors_once(module: fx.GraphModule) -> None:
    """Let the forward of a custom autograd function return each of its tensors once.

    Dynamo of torch 2.11 returns everything that a function computes. A tensor that is written in
    place is returned again for each write. Autograd passes the gradient of a repeated tensor at the
    tensor's last position, where the function's backward expects none. ``torch.compile`` then
    silently computes zeros.
    """
    for node in _calls(module):
        body = _body(node, 0)
        if body is None:
            continue
        output = body.graph.output_node()
        results, kept = output.args[0]
        first: dict[int, int] = {}
        places = [first.setdefault(_identity(result), at) for at, result in enumerate(results)]
        if len(first) == len(results):
            continue
        once = [result if places[at] == at else None for at, result in enumerate(results)]
        output.args = ((tuple(once), kept),)
        body.recompile()
        for item in list(node.users):
            if item.target is operator.getitem:
                item.args = (node, places[cast("int", item.args[1])])


def track_global_tensors(module: fx.GraphModule) -> None:
    """Replace global tensors by views in the arguments of custom autograd functions.

    A global tensor is an attribute of a class or of a Python module, for example. AOTAutograd
    tracks the view, but not the global tensor.
    """
    for node in _calls(module):
        for operand in [*node.all_input_nodes]:
            is_global = source_name(getattr(operand, "_dynamo_source", None)).startswith("G[")
            if is_global and not getattr(traced_value(operand), "requires_grad", True):
                with node.graph.inserting_before(node):
                    view = node.graph.call_function(torch.ops.aten.detach.default, (operand,))
                view.meta = dict(operand.meta)
                node.replace_input_with(operand, view)
    module.recompile()


def _identity(result: Any) -> int:
    """The ``id`` of a result's tensor; equal for all nodes that hold the same tensor."""
    value = traced_value(result) if isinstance(result, fx.Node) else None
    return id(result if value is None else value)


# With other arguments, such as written inputs, the operator is unchanged and is refused later.
_SUPPORTED_KWARGS = {"non_differentiable_idx", "saved_for_backward_idx"}


def make_traceable(module: fx.GraphModule) -> None:
    """Give nodes that apply custom functions or call NumPy a target that Dynamo can capture
    again, including nodes in checkpointed regions and in custom functions.

    Dynamo (2.13) records a custom function as a higher-order operator, which it cannot trace. It
    can trace a function that runs the operator's forward and backward graphs. It records a call of
    NumPy as an object of its own, into which it does not trace.
    """
    for node in all_nodes(module):
        if isinstance(node.target, _NUMPY):
            node.target = _as_operator(node.target)
            cast("fx.GraphModule", node.graph.owning_module).recompile()
    for node in _calls(module):
        if node.kwargs.keys() <= _SUPPORTED_KWARGS:
            node.target = _apply
            cast("fx.GraphModule", node.graph.owning_module).recompile()


def _as_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as an operator for Dynamo."""

    def call_custom(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    operator: Callable[..., Any] = torch._dynamo.allow_in_graph(call_custom)
    return operator


def _apply(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *args: Any,
    non_differentiable_idx: Any,
    saved_for_backward_idx: Any,
) -> Any:
    places = tuple(non_differentiable_idx), tuple(saved_for_backward_idx)
    return _Captured.apply(forward, backward, *places, *args)  # type: ignore[no-untyped-call]


class _Captured(torch.autograd.Function):
    """A custom autograd function that runs its two captured graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        constant: tuple[int, ...],
        saved: tuple[int, ...],
        *args: Any,
    ) -> tuple[Tensor, ...]:
        """Run the forward graph; keep the graph's second result for the backward."""
        outputs, kept = forward(*args)
        ctx.run = backward
        ctx.count, ctx.places = len(kept), saved
        ctx.unsaved = tuple(value for at, value in enumerate(kept) if at not in saved)
        ctx.save_for_backward(*(kept[at] for at in saved))
        ctx.mark_non_differentiable(*(outputs[at] for at in constant))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved, unsaved = list(ctx.saved_tensors), list(ctx.unsaved)
        places = (at in ctx.places for at in range(ctx.count))
        kept = [(saved if is_saved else unsaved).pop(0) for is_saved in places]
        return (None, None, None, None, *ctx.run(*grads, *kept))
