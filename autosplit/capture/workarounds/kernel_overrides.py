"""User-registered kernels for torch's own operators, which tracing goes through."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls

DEVICES = frozenset({"CPU", "CUDA", "HPU", "MPS", "MTIA", "XPU", "PrivateUse1"})
"""Keys of kernels that tracing does not run."""
# Nor does it those of vmap, which torch registers in Python when it is first used; and many meta
# kernels are torch's own in Python.
_UNTRACED = DEVICES | {"Meta", "FuncTorchBatched"}


def overridden() -> list[str]:
    """Names of the operators."""
    found = set(filter(None, map(_traced, torch.library._impls.copy() - _torchs())))
    # torch registers for autograd as a whole, but for some operators of its tests. Kernels for
    # one device are found where they come from C++, too.
    for device in ("CPU", "CUDA"):
        every = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autograd{device}")
        found |= {op for op in every if op.startswith("aten::") and "::_test_" not in op}
    return sorted(found)


@functools.cache  # thousands of names, the same at each capture
def _traced(registered: str) -> str | None:
    """The operator of ``library/operator/key``, if it is torch's and tracing runs its kernel."""
    library, operator, key = registered.split("/")
    return f"aten::{operator}" if library == "aten" and key not in _UNTRACED else None


def _torchs() -> set[str]:
    """What torch registers when it is imported: torch 2.15 has kernels of ``to_dense`` for tracing
    in Python.
    """
    values = vars(fake_impls).values()
    libraries = [value for value in values if isinstance(value, torch.library.Library)]
    return {name for library in libraries for name in library._op_impls}


@contextlib.contextmanager
def traced_as_registered() -> Iterator[None]:
    """Clear operators' dispatch caches, which would keep tracing on the kernel that was registered
    before.
    """
    operators = [_overload(name) for name in overridden()]
    for operator in operators:
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator in operators:
            operator._dispatch_cache.clear()


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
