"""Checks that linear algebra succeeded, as plain nodes of a graph.

``torch.linalg.inv`` and its like compute first and then look whether they could, and raise where
they could not. Tracing threads a token through such checks, so that nothing reorders them, and a
graph with tokens cannot be divided. A check needs none: it reads a result and writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch._higher_order_ops import effects
from torch.fx.node import _side_effectful_functions

from autosplit.passes.analysis.operators import CHECKS

_KEPT: set[Any] = _side_effectful_functions


@contextlib.contextmanager
def without_tokens() -> Iterator[None]:
    """While a graph is traced, checks are operators without results that dead code elimination
    leaves alone.
    """
    original = effects.has_effects

    def has_effects(op: Any, *others: Any, **options: Any) -> bool:
        return op not in CHECKS and original(op, *others, **options)

    added = CHECKS - _KEPT
    _KEPT.update(added)
    try:
        with patch.object(effects, "has_effects", has_effects):
            yield
    finally:
        _KEPT.difference_update(added)
