"""Dropout's backward in half precision, rounded as autograd rounds it on a CPU.

Autograd multiplies the gradient by noise, ``mask / (1 - p)``, which a tensor of bfloat16 or float16
holds rounded. The operator that tracing puts there multiplies by the exact number: gradients would
differ from autograd's by one constant factor, 0.15% for p = 0.1 in bfloat16.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph import SplitProgram, calls, tensor_of
from .emit import emit

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)


def half_precision_dropout(program: SplitProgram) -> bool:
    """Rewrite every such backward into those steps; True if there was one."""
    graph = program.joint.graph
    found = [node for node in calls(graph) if _rounds_otherwise(node)]
    for node in found:
        grad, mask, scale = node.args
        with graph.inserting_before(node):
            cast = emit(graph, node, aten._to_copy.default, mask, dtype=node.meta["val"].dtype)
            noise = emit(graph, node, aten.mul.Tensor, cast, scale)
            step = emit(graph, node, aten.mul.Tensor, grad, noise)
        node.replace_all_uses_with(step)
        graph.erase_node(node)
    return bool(found)


def _rounds_otherwise(node: fx.Node) -> bool:
    if node.target is not aten.native_dropout_backward.default:
        return False
    value = tensor_of(node)
    return value is not None and value.device.type == "cpu" and value.dtype in _HALF
