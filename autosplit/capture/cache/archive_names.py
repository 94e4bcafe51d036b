"""Names of operators, constants and classes that an archive of graphs may hold.

Only those that are listed here are looked up when bytes are read, so that reading runs no code of
anybody else's.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.fx.immutable_collections import immutable_dict, immutable_list

from autosplit.passes import Kind, Role
from autosplit.passes.origin import Origin

EXCHANGES = frozenset({"_c10d_functional", "_dtensor"})
NAMESPACES = frozenset({"aten", "prims"}) | EXCHANGES
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
CLASSES = (
    Kind,
    Origin,
    Role,
    immutable_dict,
    immutable_list,
    torch.Size,
    torch.device,
    complex,
    range,
    slice,
)
ON_SIZES = (
    math.ceil,
    math.floor,
    math.trunc,
    torch.sym_float,
    torch.sym_int,
    torch.sym_ite,
    torch.sym_max,
    torch.sym_min,
    torch.sym_not,
    torch.sym_sqrt,
    torch.sym_sum,
)
"""Functions of sizes that are left open, besides those of ``operator``."""
KNOWN: dict[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each for each in (*CLASSES, *ON_SIZES)
}


class NoArchiveError(Exception):
    """The graphs hold something that cannot be archived; says what."""


def named_global(module: str | None, name: str | None) -> Any:
    """A class or a function of the lists, or one of ``operator``; None for any other name."""
    if module in {"operator", "_operator"} and name in operator.__all__:
        found = getattr(operator, name)
        return None if isinstance(found, type) else found
    return KNOWN.get((module or "", name or ""))


def named_constant(name: str) -> Any:
    """A dtype, layout or memory format of torch.

    Raises:
        NoArchiveError: it is something else.
    """
    found = getattr(torch, name)
    if not isinstance(found, CONSTANTS):
        raise NoArchiveError(f"torch.{name} is not read")
    return found


def is_known(operator_name: str) -> bool:
    """Whether an operator is torch's, or one that is made in Python and is there."""
    namespace = operator_name.partition("::")[0]
    return namespace in NAMESPACES or operator_name.partition(".")[0] in OPDEFS


def named_operator(name: str) -> Any:
    """An operator of torch, or a custom one that somebody has made.

    Raises:
        NoArchiveError: there is none of this name.
    """
    if not is_known(name):
        raise NoArchiveError(f"{name} is a custom operator that nobody has made in Python")
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
