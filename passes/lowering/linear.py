"""Linear layers in generated code: one call of torch's ``linear`` for up to four operators.

::

    t = t(weight)
    rows = view(x)                       view_1 = linear(x, weight, bias)
    addmm = addmm(bias, rows, t)
    view_1 = view(addmm)

Torch's ``linear`` calls these operators itself. It is not called for inputs of more dimensions
without a bias: it may run another kernel for them where no gradient is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..analysis.operators import OPERATORS
from ..graph import calls, is_fixed

aten = torch.ops.aten


def linear_calls(graph: fx.Graph) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, fx.Node]]:
    """Return (the operands of each call of ``linear`` by the node whose value it returns, that node
    for each other node that the call replaces).
    """
    operands, replaced = dict[fx.Node, list[fx.Node]](), dict[fx.Node, fx.Node]()
    for product in filter(_is_linear, calls(graph)):
        arguments: Any = product.args
        *bias, x, weight = arguments
        result, inside = product, [weight]
        if bias and _are_flattened(x, product):
            result, inside, x = product.next, [weight, x, product], x.args[0]
        operands[result] = [x, weight.args[0], *bias]
        replaced |= dict.fromkeys(inside, result)
    return operands, replaced


_DEVICES = ("cpu", "cuda")  # others may have a kernel of their own for ``linear``


def _is_linear(product: fx.Node) -> bool:
    if product.target not in (aten.addmm.default, aten.mm.default) or product.kwargs:
        return False
    arguments: Any = product.args
    *bias, rows, weight = arguments
    if weight.target is not aten.t.default or len(weight.users) > 1 or rows is weight:
        return False
    value = weight.meta["val"]
    is_known = value.layout is torch.strided and value.device.type in _DEVICES
    return is_known and all(operand.meta["val"].ndim == 1 for operand in bias)


def _are_flattened(rows: fx.Node, product: fx.Node) -> bool:
    """Whether ``rows`` are those of a contiguous tensor of more dimensions, and only the product
    reads them. Only the next node reads the product, with these dimensions.
    """
    result = product.next
    if not {rows.target, result.target} <= OPERATORS["reshapes"]:
        return False
    x: Any = rows.args[0]
    value, shape, features = x.meta["val"], result.meta["val"].shape, product.meta["val"].shape[-1]
    return (
        [*rows.users, *product.users] == [product, result]
        and value.ndim > 2
        and is_fixed(value)
        and value.is_contiguous()
        and (*value.shape[:-1], features) == shape
        and value.shape[-1] == rows.meta["val"].shape[-1]
    )
