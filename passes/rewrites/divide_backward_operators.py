"""Divide backward operators that compute dX and dW in one call into one call for each.

``convolution_backward`` yields the gradients of input, weight and bias together, so plain
reachability would put all of it into the input-gradient graph. Its ``output_mask`` says
which are wanted: one call for the input and one for weight and bias do the same work. The
mask exists on the normalisation operators too; there the weight gradient is a by-product of
the input's and dividing would do the reductions twice, so they stay whole.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..graph import SplitProgram, calls

_MASK = 10  # position of output_mask in convolution_backward's schema


def divide_backward_operators(program: SplitProgram) -> bool:
    """Divide every fused convolution backward of the joint graph; True if any was."""
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
    mask = node.args[_MASK]
    if not isinstance(mask, (list, tuple)):
        raise TypeError(f"{node.name}: output_mask is {mask!r}, expected three booleans")
    for part_mask in ([True, False, False], [False, mask[1], mask[2]]):
        with graph.inserting_before(node):
            args = (*node.args[:_MASK], part_mask, *node.args[_MASK + 1 :])
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
