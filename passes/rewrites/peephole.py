"""Peephole rewrites of the joint graph: a node or two at a time.

``divide_backward_operators``: backward operators that compute dX and dW in one call become one call
for each. ``convolution_backward`` computes the gradients of input, weight and bias together, so
reachability would put all of it into I. Its ``output_mask`` selects the results that a call
computes. One call for the input and another for weight and bias together do no more work than the
undivided call. Normalisation operators also have a mask, but are not divided: their weight gradient
is a by-product of the input's gradient, and two calls would repeat the reductions.

``forget_statistics``: in training, the backward of batch norm takes running statistics as arguments
but reads only the batch's statistics. Without these arguments, F saves less.

``half_precision_dropout``: round dropout's backward as autograd does on a CPU. Autograd multiplies
the gradient by noise, ``mask / (1 - p)``, rounded to bfloat16 or float16. The traced operator
multiplies by the exact number. Gradients would differ from autograd's by a constant factor: by
0.15% for p = 0.1 in bfloat16.

``fold_views``: ``t(t(x))``, ``detach(x)``, and a view or an expansion to the shape of ``x`` become
``x``. Autograd transposes the gradient of a transposed weight back, in two consecutive calls, and
detaches each saved result twice. All are views of the same elements, so no computed value changes.

``fold_powers``: ``pow(x, 1)`` becomes ``x``. The derivative of a square, as in RMSNorm, computes
such a power, which is a copy.

``drop_summed_dimensions``: in the gradient of every bias, a sum keeps the summed dimensions, and a
view then drops them. One sum that drops the dimensions replaces the sum and the view. It runs the
same kernel, with one call less.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import storage_root
from ..analysis.operators import OUTPUT_MASK
from ..graph import (
    FORWARD_OUTPUT,
    SplitGraphs,
    calls,
    computed_outputs,
    is_like,
    origin_of,
    outputs,
    tensor_of,
)
from .emit import emit, erase

aten = torch.ops.aten


def divide_backward_operators(program: SplitGraphs) -> bool:
    """Divide every fused convolution backward of the joint graph; True if there was one."""
    graph = program.joint.graph
    fused = [node for node in calls(graph) if _is_fused(node)]
    for node in fused:
        _divide_call(graph, node)
    return bool(fused)


def _is_fused(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.convolution_backward.default:
        return False
    wanted = {user.args[1] for user in node.users if user.target is operator.getitem}
    return 0 in wanted and wanted != {0}


def _divide_call(graph: fx.Graph, node: fx.Node) -> None:
    mask: Any = node.args[OUTPUT_MASK]
    for part_mask in ([True, False, False], [False, mask[1], mask[2]]):
        with graph.inserting_before(node):
            args = (*node.args[:OUTPUT_MASK], part_mask, *node.args[OUTPUT_MASK + 1 :])
            part = graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
        part.meta = dict(node.meta)
        part.meta["val"] = tuple(
            value if wanted else None
            for value, wanted in zip(node.meta["val"], part_mask, strict=True)
        )
        for user in list(node.users):
            if part_mask[user.args[1]]:  # type: ignore[index]
                user.replace_input_with(node, part)
    graph.erase_node(node)


def forget_statistics(program: SplitGraphs) -> bool:
    """Remove running statistics from each batch norm's backward that ignores them; True if there
    was one.
    """
    changed = False
    for node in calls(program.joint.graph):
        if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            kept = (*node.args[:3], None, None, *node.args[5:])
            changed = changed or node.args != kept
            node.args = kept
    return changed


_HALF = (torch.bfloat16, torch.float16)


def half_precision_dropout(program: SplitGraphs) -> bool:
    """Rewrite dropout's backward in half precision; True if there was one."""
    graph = program.joint.graph
    backwards = [node for node in calls(graph) if _rounds_otherwise(node)]
    for node in backwards:
        grad, mask, scale = node.args
        with graph.inserting_before(node):
            cast = emit(graph, node, aten._to_copy.default, mask, dtype=node.meta["val"].dtype)
            noise = emit(graph, node, aten.mul.Tensor, cast, scale)
            step = emit(graph, node, aten.mul.Tensor, grad, noise)
        node.replace_all_uses_with(step)
        graph.erase_node(node)
    return bool(backwards)


def _rounds_otherwise(node: fx.Node) -> bool:
    if node.target is not aten.native_dropout_backward.default:
        return False
    value = tensor_of(node)
    return value is not None and value.device.type == "cpu" and value.dtype in _HALF


_VIEWS = (aten.detach.default, aten.expand.default, aten.t.default, aten.view.default)


def fold_views(program: SplitGraphs) -> bool:
    """Replace views that change nothing by the tensors that they view; True if there was one."""
    graph, changed = program.joint.graph, False
    # An output of the user's forward stays a separate tensor, as in eager.
    returned = {value for _, value in outputs(graph, *FORWARD_OUTPUT)}
    for node in calls(graph):
        same = _viewed(node) if node.target in _VIEWS and node not in returned else None
        if same is not None:
            first: Any = node.args[0]
            node.replace_all_uses_with(same)
            erase(graph, [node] if first is same else [first, node])
            changed = True
    return changed


def _viewed(view: fx.Node) -> fx.Node | None:
    """The tensor that a view of the kinds ``_VIEWS`` returns unchanged; None if it changes it."""
    first: Any = view.args[0]
    if view.target is aten.t.default:
        same: fx.Node | None = first.args[0] if first.target is aten.t.default else None
        return same
    return first if view.target is aten.detach.default or is_like(first, view) else None


_COPIES = ("cpu", "cuda")
"""Types of devices on which a power of 1 is a copy, bit for bit."""


def fold_powers(program: SplitGraphs) -> bool:
    """Replace powers of 1 by their bases; True if there was one."""
    graph = program.joint.graph
    # A result that leaves the graph stays a separate tensor, as in eager.
    returned = {storage_root(value) for _, value in computed_outputs(graph)}
    powers = graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
    folded = [node for node in powers if node not in returned and _is_copy(node)]
    for node in folded:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return bool(folded)


def _is_copy(node: fx.Node) -> bool:
    """Whether the node is a power of 1 that its base can replace: both have the same dtype and
    strides. False if the forward computes the power of a caller's tensor, because the caller may
    overwrite that tensor before the backward.
    """
    base: Any = node.args[0]
    old, new = base.meta["val"], node.meta["val"]
    is_private = storage_root(base).op != "placeholder" or origin_of(node).is_backward
    same = old.dtype is new.dtype and tuple(old.stride()) == tuple(new.stride())
    return bool(node.args[1] == 1 and is_private and same and old.device.type in _COPIES)


def drop_summed_dimensions(program: SplitGraphs) -> bool:
    """Merge sums with the views that drop their dimensions; True if there was one."""
    graph = program.joint.graph
    views = [node for node in calls(graph) if node.target is aten.view.default]
    pairs: list[tuple[fx.Node, Any]]
    pairs = [(view, total) for view in views if _is_kept_sum(total := view.args[0], view)]
    for view, total in pairs:
        total.args, total.meta["val"] = total.args[:2], view.meta["val"]
        view.replace_all_uses_with(total)
        graph.erase_node(view)
    return bool(pairs)


def _is_kept_sum(total: Any, view: fx.Node) -> bool:
    """Whether ``total`` is a sum that keeps its first dimension, and only ``view``, which drops
    that dimension, reads it.
    """
    return (
        total.target is aten.sum.dim_IntList
        and total.args[1:] == ([0], True)
        and len(total.users) == 1
        and total.meta["val"].shape[1:] == view.meta["val"].shape
    )
