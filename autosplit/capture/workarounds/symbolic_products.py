"""Products of more than two sizes that are symbols."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.fx.experimental import proxy_tensor

_NAME = "_build_proxy_for_sym_expr"


@contextlib.contextmanager
def products_by_twos() -> Iterator[None]:
    """While a graph is traced, a size that was computed out of its sight, as DTensor computes
    those of local tensors, is a product of two others, not a call of ``operator.mul`` with as many
    arguments as the product has factors, which fails where it runs (seen with torch 2.13).
    """
    original = getattr(proxy_tensor, _NAME, None)
    if original is None:
        yield
        return

    def build(tracer: Any, expr: Any, out: Any = None) -> Any:
        many = getattr(expr, "is_Mul", False) and len(expr.args) > 2
        if many and expr not in tracer.sympy_expr_tracker:
            first, *others = expr.args
            rest = expr.func(*others, evaluate=False)
            expr = expr.func(first, rest, evaluate=False)
        return original(tracer, expr, out)

    with patch.object(proxy_tensor, _NAME, build):
        yield
