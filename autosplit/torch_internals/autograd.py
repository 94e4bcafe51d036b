"""Autograd's engine and the tracers: which backward runs, and under what a call runs
(``torch.func`` transforms, torch.compile, torch.export, torch.jit).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.autograd.graph import Node

without_autocast = torch._C._DisableAutocast
"""Context that disables autocast, for graphs that already have casts as operators."""

is_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device."""


class WithoutAutograd:
    """Context without grad mode and without autocast, in a third of the time of torch's own
    contexts, because every call of a stage enters it.
    """

    def __enter__(self) -> None:
        self._grad_mode, self._autocast = torch.is_grad_enabled(), without_autocast()
        torch._C._set_grad_enabled(False)
        self._autocast.__enter__()

    def __exit__(self, *error: object) -> None:
        self._autocast.__exit__(*error)
        torch._C._set_grad_enabled(self._grad_mode)


graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward has ``retain_graph=True``."""

current_backward = torch._C._current_graph_task_id
"""Number of the running backward of this thread, or -1; later backwards have higher numbers."""


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Call a function at the end of the running backward, before ``backward()`` returns.

    Without a running backward, call it now.
    """
    if current_backward() < 0:
        function()
    else:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(function)


def has_saved_tensors_hooks() -> bool:
    """Whether saved-tensor hooks are set, as by ``torch.utils.checkpoint`` or for offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def will_run(node: Node) -> bool:
    """Whether the running backward visits a node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` skip nodes that they do not need.
    """
    return bool(torch._C._will_engine_execute_node(node))


def is_requested(node: Node) -> bool:
    """Whether the running backward computes a leaf's gradient, to accumulate or to return it."""
    try:
        return will_run(node)
    except RuntimeError:  # raised for the inputs of torch.autograd.grad
        return True


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or forward-mode differentiation is active."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def direct_apply(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``kind.apply`` without its check for ``torch.func`` transforms.

    The caller must know that no transform is active.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    return apply


P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that keeps ``torch.compile`` from tracing the function and its callees.

    It costs almost nothing outside of ``torch.compile``, and does not import Dynamo.
    """
    disabled = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs or traces the running backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def in_compiler() -> bool:
    """Whether torch.compile is tracing. The answer holds in Dynamo's code and in traced code."""
    return TracingContext.try_get() is not None


def is_exported() -> bool:
    """Whether ``torch.export``, ``torch.onnx`` or ``torch.jit.trace`` is recording this call."""
    if torch._C._get_tracing_state() is not None:
        return True
    # The flag is global, and another thread may be exporting. ``is_exporting()`` cannot be used:
    # in torch 2.11 it is always True under Dynamo.
    return torch.compiler._is_exporting_flag and (
        torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
    )


def checks_nan() -> bool:
    """Whether ``torch.autograd.detect_anomaly()`` is on, with its check of gradients."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def memoryless_tensor(kind: type[T], like: Tensor, dtype: torch.dtype) -> T:
    """A tensor without memory, of a subclass of Tensor.

    C functions that access its memory raise a RuntimeError, instead of reading address 0.

    Args:
        kind: the subclass.
        like: a tensor with the same shape and device.
        dtype: the dtype of the new tensor.
    """
    make: Any = Tensor._make_wrapper_subclass
    wrapper = make(kind, like.shape, dtype=dtype, device=like.device)
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return cast(T, wrapper)


without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which functions of tensors call no ``__torch_function__`` of subclasses."""


@contextlib.contextmanager
def outside_dispatch() -> Iterator[None]:
    """Context with the dispatch keys of a fresh thread.

    Inside ``__torch_dispatch__``, autograd is off, and ``enable_grad`` cannot enable it.
    """
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
        yield


def _dispatch_outside() -> tuple[Any, Any]:
    """Dispatch keys that a fresh thread includes and excludes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            lambda: (
                torch._C._dispatch_tls_local_include_set(),
                torch._C._dispatch_tls_local_exclude_set(),
            )
        ).result()


_OUTSIDE = _dispatch_outside()
