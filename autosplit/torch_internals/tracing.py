"""Detection of tracing and recording: torch.compile, torch.export, torch.jit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._guards import TracingContext

P = ParamSpec("P")

T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: ``torch.compile`` leaves the function and what it calls alone. Costs next to
    nothing outside of it, and does not import it.
    """
    disabled = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def in_compiler() -> bool:
    """Whether this is asked by torch.compile, or by what it traces, while it makes a graph."""
    return TracingContext.try_get() is not None


def is_exported() -> bool:
    """Whether ``torch.export``, ``torch.onnx`` or ``torch.jit.trace`` runs this to record it."""
    if torch._C._get_tracing_state() is not None:
        return True
    # The flag is the process's: another thread may be capturing a model. Asked for it by
    # ``is_exporting()``, Dynamo of torch 2.11 says True always.
    return torch.compiler._is_exporting_flag and (
        torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
    )
