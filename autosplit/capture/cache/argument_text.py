"""Text of an argument in a graph, and the names of the functions that it calls."""

from __future__ import annotations

import builtins
import functools
import sys
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import _get_qualified_name

from autosplit.passes.analysis.operators import OVERLOAD
from autosplit.torch_internals.dtensor_facts import mesh_facts, placement_facts

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NAMESPACES = ("aten::", "prims::")
# Others keep what they do elsewhere, as kernels of Triton are in a table of the process.
_WITH_BODIES = (
    torch.ops.higher_order.autograd_function_apply,
    torch.ops.higher_order.tag_activation_checkpoint,
)
"""Higher-order operators that do what their arguments and bodies say, and nothing else."""

_ROOTS = ("torch.", "operator.", "_operator.", "math.", "builtins.")


class NoFingerprintError(Exception):
    """The graph has no fingerprint, as another could have the same text; says why."""


def argument_text(value: Any) -> str:
    """Text of a node's argument that no other argument has.

    Raises:
        NoFingerprintError: there is none.
    """
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if type(value) in _PLAIN:
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, _NAMED):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, (tuple, list)):
        return f"{_kind(value)}({','.join(map(argument_text, value))})"
    if isinstance(value, dict):
        pairs = (f"{argument_text(key)}={argument_text(each)}" for key, each in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, slice):
        return f"slice({','.join(map(argument_text, (value.start, value.stop, value.step)))})"
    shared = placement_facts(value) or mesh_facts(value)
    return target_name(value) if shared is None else f"{type(value).__name__}:{shared!r}"


def target_name(function: Any) -> str:
    """Qualified name of an operator or a function of torch or Python.

    Raises:
        NoFingerprintError: it is somebody else's, whose code may change.
    """
    if isinstance(function, OVERLOAD):
        if not is_torch_operator(function):
            raise NoFingerprintError(f"{function} is a custom operator")
        return str(function.name())
    if isinstance(function, HigherOrderOperator):
        if function not in _WITH_BODIES:
            raise NoFingerprintError(f"{function.name()} is a higher-order operator")
        return f"higher_order.{function.name()}"
    own = getattr(function, "__name__", "")
    if own and getattr(builtins, own, None) is function:
        return f"builtins.{own}"
    try:
        name = _get_qualified_name(function)
    except (AttributeError, RuntimeError, AssertionError) as error:
        raise NoFingerprintError(f"{function!r} has no name") from error
    if _lookup(name) is not function:  # a static method
        name = f"{function.__module__}.{getattr(function, '__qualname__', own)}"
    if not name.startswith(_ROOTS) or _lookup(name) is not function:
        raise NoFingerprintError(f"{name} is no function of torch's")
    return name


def is_torch_operator(operator: Any) -> bool:
    """Whether an operator is one of torch's own."""
    return isinstance(operator, OVERLOAD) and operator.name().startswith(_NAMESPACES)


def _kind(value: Any) -> str:
    """Kind of a sequence; fx has lists of its own, equal to plain ones in a graph."""
    if isinstance(value, list):
        return "list"
    if type(value) in (tuple, torch.Size):
        return "tuple"
    raise NoFingerprintError(f"an argument is a {type(value).__qualname__}")


def _lookup(name: str) -> Any:
    root, *rest = name.split(".")
    found: Any = sys.modules.get(root)
    return functools.reduce(lambda owner, each: getattr(owner, each, None), rest, found)
