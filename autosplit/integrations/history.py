"""What one forward call left in autograd's graph: which weight gradients wait, which do not.

Compiled graphs, and operators that ran outside any, are nodes of one graph behind the
outputs. A parameter that is reached there gets its gradient from an ordinary backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..compat_backward import output_shape
from .call import call_of

# Autograd nodes through which a weight reaches the product that uses it.
_SAME_VALUES = ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "ToCopy")


@dataclasses.dataclass
class History:
    """Weight gradients of one forward call.

    Attributes:
        deferred: parameters whose gradient W computes.
        ordinary: parameters with a gradient from an ordinary backward, and the floating-point
            operations of those gradients outside compiled graphs (matrix products and
            convolutions; everything else counts 0).
    """

    deferred: set[nn.Parameter] = dataclasses.field(default_factory=set)
    ordinary: dict[nn.Parameter, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> History:
        """Walk back from the outputs to the inputs."""
        history = cls()
        stop = {each.grad_fn for each in inputs}
        for node in _nodes([each.grad_fn for each in outputs], stop):
            for index, (operand, _) in enumerate(node.next_functions):
                leaf = getattr(operand, "variable", None)
                call = None if leaf is None else call_of(leaf)
                if call is not None:
                    history.deferred.add(call[0].parameters[call[1]])
                parameter = _weight(operand)
                if parameter is not None:
                    count = history.ordinary.get(parameter, 0)
                    history.ordinary[parameter] = count + _flops(node, index, parameter)
        return history


def _nodes(roots: Iterable[Any], stop: set[Any]) -> Iterator[Any]:
    seen = {None, *stop}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(operand for operand, _ in node.next_functions)


def _weight(node: Any) -> nn.Parameter | None:
    """The parameter whose values this node yields, as they are or arranged otherwise."""
    while node is not None and node.name().removesuffix("Backward0") in _SAME_VALUES:
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, nn.Parameter) else None


def _flops(node: Any, index: int, weight: Tensor) -> int:
    """Floating-point operations of the gradient of one operand of a product."""
    name = node.name().removesuffix("Backward0")
    shape = output_shape(node)
    if name == "Convolution" and index == 1:
        # Each element of the smaller tensor's side meets every weight of one channel.
        transposed = node._saved_transposed
        source = node.next_functions[0][0] if transposed else node
        return 0 if source is None else 2 * math.prod(output_shape(source)) * weight[0].numel()
    if name in {"Mm", "Addmm", "Bmm", "Baddbmm"} and index == len(node.next_functions) - 1:
        columns = shape[-1] * (shape[0] if weight.dim() == 3 else 1)
        return 2 * math.prod(shape) * (weight.numel() // columns)
    return 0
