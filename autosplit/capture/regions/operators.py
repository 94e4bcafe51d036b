"""Operators that stand for F, I and W of a block while the model around it is traced.

What F saves and what I defers are one token each, and so are the block's parameters and their
gradients: a trace takes its time by the tensor, and the block's own trace knows all of them.
``expansion`` puts it in afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor


class TracedCall(Protocol):
    """A call of a block, as far as the operators need to know it."""

    @property
    def output_values(self) -> list[Tensor]:
        """Fake tensors like those that F returns."""

    @property
    def input_grad_values(self) -> list[Tensor]:
        """Fake tensors like the gradients that I returns."""


_CALLS: ContextVar[Sequence[TracedCall]] = ContextVar("calls of blocks in a trace")

_LIBRARY = torch.library.Library("autosplit_block", "DEF")
_LIBRARY.define("forward(int call, Tensor[] inputs, Tensor state) -> Tensor[]")
_LIBRARY.define("backward_input(int call, Tensor saved, Tensor[] grads) -> Tensor[]")
_LIBRARY.define("backward_weight(int call, Tensor deferred) -> Tensor")

FORWARD: Any = torch.ops.autosplit_block.forward.default
BACKWARD_INPUT: Any = torch.ops.autosplit_block.backward_input.default
BACKWARD_WEIGHT: Any = torch.ops.autosplit_block.backward_weight.default


def new_token() -> Tensor:
    """A tensor that stands for several."""
    return torch.empty(1)


def _forward(call: int, inputs: list[Tensor], state: Tensor) -> list[Tensor]:
    return [*map(_like, _CALLS.get()[call].output_values), new_token()]


def _backward_input(call: int, saved: Tensor, grads: list[Tensor]) -> list[Tensor]:
    return [*map(_like, _CALLS.get()[call].input_grad_values), new_token()]


def _backward_weight(call: int, deferred: Tensor) -> Tensor:
    return new_token()


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


for _name, _fake in (
    ("forward", _forward),
    ("backward_input", _backward_input),
    ("backward_weight", _backward_weight),
):
    torch.library.register_fake(f"autosplit_block::{_name}", _fake, lib=_LIBRARY)


@contextlib.contextmanager
def tracing_calls(calls: Sequence[TracedCall]) -> Iterator[None]:
    """While the operators stand for these calls, by their places."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)
