"""Calls that stand for whole graphs in a trace of AOTAutograd, and fake tensors as their results.

A call is written into the trace as one node. As an operator it would be dispatched through every
mode of the trace, which takes most of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor,
)


def trace_call(
    target: Callable[..., Any], number: int, operands: Sequence[Tensor], values: Sequence[Tensor]
) -> list[Tensor]:
    """Add the node ``target(number, operands)`` to the present trace of AOTAutograd, and return its
    results: tensors of the trace. Without a node, if AOTAutograd runs the graph untraced.

    Args:
        target: the target of the node; never called.
        number: the first argument.
        operands: tensors of the trace.
        values: a new fake tensor for each result.
    """
    mode = get_proxy_mode()
    if mode is not None:
        tracer: Any = mode.tracer
        with disable_functional_mode():
            inner = [operand.from_functional() for operand in operands]  # type: ignore[attr-defined]
        proxies = [*map(tracer.unwrap_proxy, inner)]
        call = tracer.create_proxy("call_function", target, (number, proxies), {})
        for at, value in enumerate(values):
            item = tracer.create_proxy("call_function", operator.getitem, (call, at), {})
            item.node.meta["val"] = value
            track_tensor(value, item, constant=None, tracer=tracer)
    return [*map(FunctionalTensor.to_functional, values)]


def fake_empty(
    shape: Sequence[Any], strides: Sequence[Any], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """``torch.empty_strided`` under the active fake mode, without its dispatch, which takes most of
    the time.
    """
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    # Otherwise torch 2.11 traces the arithmetic of sizes, of which some are in no node yet.
    with disable_proxy_modes_tracing(), in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


class _ComputedTensors(torch.autograd.Function):
    """Returns new tensors as computed from ``start``."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, make: Callable[[], Sequence[Tensor]], trained: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        values = make()
        ctx.mark_non_differentiable(*[v for v, t in zip(values, trained, strict=True) if not t])
        return tuple(values)


def computed(make: Callable[[], Sequence[Tensor]], trained: Sequence[bool]) -> Sequence[Tensor]:
    """Fake tensors that autograd treats as computed, not as leaves, so that in-place operators
    accept them.

    Args:
        make: makes the tensors, as leaves.
        trained: for each tensor, whether it requires a gradient.
    """
    if not any(trained):
        return make()
    start = fake_empty([1], [1], dtype=torch.float32, device=torch.device("cpu"))
    with torch.enable_grad():
        results: tuple[Tensor, ...] = _ComputedTensors.apply(start.requires_grad_(), make, trained)  # type: ignore[no-untyped-call]
    return results
