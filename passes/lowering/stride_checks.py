"""Runtime checks of strides before operators that address memory directly.

Tracing decides by the strides that torch's fake kernels promise, and some real kernels give
others (batch norm of a transposed input). Most operators do not care; ``as_strided`` would
read other elements, and so would the gradient that was traced for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ..errors import PassError, StrideError
from ..graph import source_line

_aten = torch.ops.aten
_ADDRESSING = (
    _aten.as_strided.default,
    _aten.as_strided_copy.default,
    _aten.as_strided_scatter.default,
)


def stride_check(node: fx.Node, name_of: Callable[[fx.Node], str]) -> list[str]:
    """Lines of Python to run before the node; none where it does not address memory.

    Raises:
        PassError: the operand's strides are not known before the graph runs.
    """
    if node.target not in _ADDRESSING:
        return []
    operand = node.args[0]
    value = operand.meta["val"] if isinstance(operand, fx.Node) else None
    if not isinstance(operand, fx.Node) or not isinstance(value, Tensor):
        raise PassError(f"{node.name}: {node.target} without a tensor to address")
    name = name_of(operand)
    # Where there is one element, or none, its stride says nothing.
    expected = {dim: value.stride(dim) for dim, size in enumerate(value.shape) if size != 1}
    if not all(type(stride) is int for stride in (*expected.values(), *value.shape)):
        line = source_line(node)
        raise PassError(
            f"{node.target} addresses memory in a graph whose sizes vary"
            + (f" (from {line})" if line else "")
        )
    if not expected or 0 in value.shape:
        return []
    found = "".join(f"{name}.stride({dim}), " for dim in expected).strip()
    message = _message(node, tuple(value.stride()))
    return [
        f"    if ({found}) != {tuple(expected.values())}:",
        f"        from {StrideError.__module__} import StrideError",
        f"        raise StrideError({message!r} + str({name}.stride()))",
    ]


def _message(node: fx.Node, expected: tuple[int, ...]) -> str:
    line = source_line(node)
    return (
        f"{node.target}"
        + (f" (of {line})" if line else "")
        + f" addresses the memory of a tensor with strides {expected}, as tracing saw it; call "
        "contiguous() on the tensor first. The kernel gave it strides "
    )
