"""Binding against ``inspect.Signature.bind``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from autosplit.capture.guards import ForwardScope


def plain(a: Any, b: Any, c: Any = 3) -> None: ...
def keyword(a: Any, *, b: Any, c: Any = 3) -> None: ...
def variable(a: Any, *rest: Any, **more: Any) -> None: ...
def positional(a: Any, b: Any = 2, /, c: Any = 3) -> None: ...
def nothing() -> None: ...


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 2, 3), {}),
    ((1, 2, 3, 4), {}),
    ((1,), {"b": 2}),
    ((1,), {"a": 2}),
    ((1, 2), {"b": 2}),
    ((), {"a": 1, "b": 2, "c": 4}),
    ((1,), {"b": 2, "d": 5}),
    ((), {"d": 5}),
]


@pytest.mark.parametrize("function", [plain, keyword, variable, positional, nothing])
def test_binds_as_inspect_does(function: Callable[..., None]) -> None:
    bound_by = ForwardScope(function).bound
    signature = inspect.signature(function)
    for args, kwargs in CALLS:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            assert bound_by(args, kwargs) is None, (args, kwargs)
        else:
            bound.apply_defaults()
            assert bound_by(args, kwargs) == bound.arguments, (args, kwargs)
