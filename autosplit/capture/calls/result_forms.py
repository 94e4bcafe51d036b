"""Structures of results as plain data: what a pytree's spec says, with classes by their names."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES

from autosplit.capture.cache.archive_names import named_constant
from autosplit.capture.cache.argument_text import NoFingerprintError
from autosplit.capture.pytree_objects import Skeleton
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten

_DATA = (type(None), bool, int, float, str, bytes)
_LEAF = tree_flatten(0)[1]


def write_spec(spec: TreeSpec) -> Any:
    """The spec as plain data, from which ``read_spec`` makes an equal one.

    Raises:
        NoFingerprintError: it holds something else than classes, keys and constants.
    """
    if spec == _LEAF:
        return None
    children = [write_spec(child) for child in _children(spec)]
    form = _write(spec.type), _write(spec.context), children
    if read_spec(form) != spec:
        raise NoFingerprintError(f"results in a {spec.type.__qualname__} have no form on disk")
    return form


def read_spec(form: Any) -> TreeSpec:
    """The spec of ``write_spec``.

    Raises:
        Exception: this process has no such classes.
    """
    if form is None:
        return _LEAF
    kind, context, children = form
    found = _read(kind)
    if found not in SUPPORTED_NODES:
        raise NoFingerprintError(f"{found} is no node of a pytree")
    return TreeSpec(found, _read(context), [read_spec(child) for child in children])


def _children(spec: TreeSpec) -> list[TreeSpec]:
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


def _write(value: Any) -> Any:
    if type(value) in _DATA:
        return "plain", value
    if type(value) in (list, tuple):
        return type(value).__name__, [_write(each) for each in value]
    if type(value) is dict:
        return "dict", [(_write(key), _write(each)) for key, each in value.items()]
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    if isinstance(value, Skeleton):
        return "object", [_write(each) for each in (value.kind, value.children, value.rest)]
    if isinstance(value, type) and _find(value.__module__, value.__qualname__) is value:
        return "class", (value.__module__, value.__qualname__)
    raise NoFingerprintError(f"results hold a {type(value).__qualname__}")


def _read(form: Any) -> Any:
    what, value = form
    if what == "plain":
        return value
    if what == "class":
        found = _find(*value)
        if not isinstance(found, type):
            raise NoFingerprintError(f"{value} is no class")
        return found
    if what == "dict":
        return {_read(key): _read(each) for key, each in value}
    if what == "dtype":
        return named_constant(value)
    if what == "device":
        return torch.device(value)
    if what == "object":
        return Skeleton(*map(_read, value))
    return (list if what == "list" else tuple)(map(_read, value))


def _find(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
