"""Settings under which Dynamo and AOTAutograd trace the operators of eager mode.

Products of more than two sizes that are symbols.

Checks that linear algebra succeeded, as plain nodes of a graph.

``torch.linalg.inv`` and its like compute first and then look whether they could, and raise where
they could not. Tracing threads a token through such checks, so that nothing reorders them, and a
graph with tokens cannot be divided. A check needs none: it reads a result and writes nothing.

Strides of the gradients of outputs that overlap themselves.

User-registered kernels for torch's own operators, which tracing goes through.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._higher_order_ops import effects
from torch._subclasses import fake_impls
from torch.fx.experimental import proxy_tensor
from torch.fx.node import _side_effectful_functions

from autosplit.passes.analysis.aliasing import overlaps_itself
from autosplit.passes.analysis.operators import CHECKS
from autosplit.torch_internals.version import TORCH

from .recurrent_layers import without_fused_recurrence

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


@contextlib.contextmanager
def gradients_apart() -> Iterator[None]:
    """torch expects the gradient of an output to lie as the output does, and copies it there. Of
    an output whose elements share memory (``unfold``, ``as_strided``) elements of the gradient
    would then overwrite each other, so that is expected to be contiguous. (torch 2.13 does the
    same by itself for ``expand`` only.)
    """
    guess = MemoryFormatMeta.from_tensor

    def apart(tensor: Tensor, *args: Any, **kwargs: Any) -> MemoryFormatMeta | None:
        guessed = guess(tensor, *args, **kwargs)
        if guessed is None or guessed.memory_format is not None or not overlaps_itself(tensor):
            return guessed
        return MemoryFormatMeta(memory_format=torch.contiguous_format)

    with patch.object(MemoryFormatMeta, "from_tensor", staticmethod(apart)):
        yield


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


# numpy.random draws what it draws in eager; torch's generator would draw instead.
AS_IN_EAGER: dict[str, Any] = {"use_numpy_random_stream": True}
"""Settings of Dynamo."""

if TORCH < (2, 12):
    # A parameter that is frozen or thawed is noticed, though it stays where it was in its module.
    AS_IN_EAGER |= {
        "use_recursive_dict_tags_for_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
    }


@contextlib.contextmanager
def as_eager(module: fx.GraphModule, decompositions: object = None) -> Iterator[None]:
    """While a graph of Dynamo is traced by AOTAutograd:

    - random operators stay though nobody reads them. They move the generator; without them all
      that is drawn later would differ from eager's for the same seed. Not so where operators are
      decomposed for a backend, which draws in a way of its own;
    - the backward runs outside of the autocast that its forward ran in;
    - checks of linear algebra are operators like others, without tokens;
    - recurrent layers are traced without the fused kernel, which its fake does not match;
    - gradients of outputs that overlap themselves do not;
    - sizes that are symbols are multiplied by twos;
    - kernels that somebody registered for torch's operators are traced through.
    """
    drawing = {} if decompositions is not None else {"fallback_random": True}
    with (
        torch._inductor.config.patch(drawing),
        torch._functorch.config.patch(backward_pass_autocast="off"),
        without_fused_recurrence(module),
        without_tokens(),
        gradients_apart(),
        products_by_twos(),
        traced_as_registered(),
    ):
        yield
