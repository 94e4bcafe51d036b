"""State of one parameter's ``.grad`` while a part of the gradient is pending."""

from __future__ import annotations

import enum
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autosplit.autograd.pending_work import GradientSource
from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    exchanged,
    in_transform,
    memoryless_tensor,
    own_gradient,
    tensor_users,
)
from autosplit.torch_internals.tracing import in_compiler

from .lazy_gradient import LazyGradient, pending


class SlotState(enum.Enum):
    """Whether ``.grad`` holds the lazy gradient."""

    IDLE = enum.auto()
    ARMED = enum.auto()
    COMPUTING = enum.auto()  # ``.grad`` is the sum so far


# Looked up in an enumeration, they take longer than all the rest.
IDLE, ARMED, COMPUTING = SlotState


class GradientSlot:
    """State of one parameter's ``.grad`` while a part of the gradient is pending.

    The lazy gradient must not hold its slot, which holds what is pending: what ``.grad`` refers to
    is hidden from Python's garbage collector.

    Attributes:
        parameter: whose, while it lives.
        key: its ``id``.
        state: whether ``.grad`` holds the lazy gradient.
        lazy: the lazy gradient, kept to be used again; None where it is to be noticed when it is
            freed.
        ref: a weak reference to it.
        base: what ``.grad`` was before, to which the pending part will be added.
        aside: what ``.grad`` is meanwhile, while a gradient is computed that somebody holds though
            it is not in ``.grad`` any more.
        sources: queues with gradients pending, in the order in which they began.
        dense: whether everything pending is known to be strided.
        failure: why a part of the gradient is lost.
        hidden: whether it is kept out of ``.grad``, see ``LazyGradients.hide``.
        out: the lazy gradient, where that is so.
    """

    __slots__ = (
        "__weakref__",
        "aside",
        "base",
        "dense",
        "failure",
        "hidden",
        "key",
        "lazy",
        "out",
        "parameter",
        "ref",
        "sources",
        "state",
    )

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.key = id(parameter)
        self.state = IDLE
        self.lazy: LazyGradient | None = None
        self.ref: Any = _nobody
        self.base: Tensor | None = None
        self.aside: list[Tensor | None] | None = None
        self.sources: tuple[GradientSource, ...] = ()
        self.dense = True
        self.failure: BaseException | None = None
        self.hidden = False
        self.out: Tensor | None = None

    @staticmethod
    def of(parameter: Tensor) -> GradientSlot | None:
        """The slot of the lazy gradient in a parameter's ``.grad``."""
        lazy = parameter.grad
        found = pending(lazy) if type(lazy) is LazyGradient else None
        return found[0] if found is not None and found[1] is parameter else None

    def awaited_by(self, lazy: LazyGradient) -> Tensor | None:
        """The parameter, where a part of the gradient that ``lazy`` stands for is pending."""
        if self.current() is not lazy:
            return None
        parameter = self.parameter()
        return None if self.state is IDLE else parameter

    def has_final_metadata(self, parameter: Tensor) -> bool:
        """Whether shape, dtype and the like of the gradient are known already."""
        fixed = getattr(parameter, "grad_dtype", parameter.dtype) is not None
        return fixed and (self.base is None or not self.base.requires_grad)

    @property
    def is_strided(self) -> bool:
        """Whether the gradient is known to be strided."""
        return (
            self.dense
            and self.state is ARMED
            and self.failure is None
            and (self.base is None or self.base.layout is torch.strided)
        )

    def current(self) -> LazyGradient | None:
        """The lazy gradient, while it lives."""
        return self.ref() if self.lazy is None else self.lazy

    def installed(self, parameter: Tensor) -> bool:
        """Whether the lazy gradient is in ``.grad``."""
        lazy = self.ref() if self.lazy is None else self.lazy
        return (lazy is not None and parameter.grad is lazy) or self.hidden

    def arm(self, parameter: Tensor, base: Tensor | None) -> None:
        """Put the lazy gradient into ``.grad``, in the place of ``base``."""
        lazy = self.ref() if self.lazy is None else self.lazy
        self.base, self.state = base, ARMED
        if lazy is not None:
            try:
                parameter.grad = lazy
                self.conceal(parameter)
                return
            except RuntimeError:  # the parameter has another shape, dtype or device by now
                self.forget()
        lazy = self.lazy = memoryless_tensor(LazyGradient, parameter, _dtype(parameter))
        lazy._slot = weakref.ref(self)
        self.watch(lazy)
        parameter.grad = lazy
        self.conceal(parameter)

    def conceal(self, parameter: Tensor) -> None:
        """Take the lazy gradient out of ``.grad`` where it is to be hidden."""
        if self.hidden:
            self.out, parameter.grad = parameter.grad, None

    def reveal(self) -> None:
        """Put a concealed lazy gradient back."""
        lazy, self.out, self.hidden = self.out, None, False
        parameter = self.parameter()
        still = self.state is ARMED and lazy is not None and self.current() is lazy
        if still and parameter is not None and parameter.grad is None:
            parameter.grad = lazy

    def watch(self, lazy: LazyGradient) -> None:
        """Have it noticed when the lazy gradient is freed, unless it is kept."""
        self.ref = weakref.ref(lazy, partial(_gone, lazy._slot))

    def forget(self) -> None:
        """Let go of the lazy gradient; the next one is another object."""
        self.lazy, self.ref = None, _nobody

    def hand_over(self, lazy: LazyGradient, real: Tensor) -> None:
        """Have a lazy gradient, which is referenced elsewhere, be the real one from now on.

        Autograd adds to one tensor from backward to backward. So whoever holds the lazy gradient
        gets the object that ``.grad`` is, and the memory of both is exchanged; where somebody
        holds the other object too, the lazy gradient refers to it.

        Args:
            lazy: this parameter's.
            real: a variable of the caller's, and in ``.grad`` where it belongs there.
        """
        self.forget()
        if not exchanged(lazy, real):
            lazy._real = real
            return
        spare: Any = real
        spare._slot = lazy._slot
        del lazy._slot
        if tensor_users(spare) > 1:  # in the ``.grad`` of another parameter, say
            spare._real = lazy
        else:
            self.lazy = spare
            self.watch(spare)

    def disarm(self) -> None:
        """Note that nothing is pending any more."""
        self.state = IDLE
        self.base = self.failure = None

    def held(self) -> bool:
        """Whether the lazy gradient, which is not in ``.grad``, is referenced elsewhere."""
        if self.lazy is None:
            return self.ref() is not None
        return getrefcount(self.lazy) > OURS or tensor_users(self.lazy) > 1

    def compute(self) -> None:
        """Have all sources compute their pending gradients.

        Raises:
            SplitError: a part is lost.
        """
        self._refuse_failed()
        # What tracing and torch.func set up for this thread is not meant for W.
        if in_compiler() or in_transform():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._compute).result()
        else:
            self._compute()
        self._refuse_failed()

    def _refuse_failed(self) -> None:
        if self.failure is not None:
            raise SplitError(
                f"a part of this gradient is lost, because computing it failed: {self.failure}\n"
                "Call optimizer.zero_grad() and repeat the step"
            ) from self.failure

    def _compute(self) -> None:
        parameter = self.parameter()
        if parameter is not None:
            for source in self.sources:
                source.compute_for(parameter)

    def add(self, parameter: Tensor, gradient: Tensor, **how: Any) -> None:
        """Accumulate a gradient that was not deferred."""
        base = self.base if self.state is ARMED else parameter.grad
        if base is not None:
            base.add_(gradient, **how)
            return
        gradient = gradient.mul(how["alpha"]) if "alpha" in how else gradient
        strided = gradient.layout is torch.strided
        found = own_gradient(parameter, gradient, True) if strided else gradient.clone()
        if self.state is ARMED:
            self.base = found
        else:
            parameter.grad = found

    def zero(self, parameter: Tensor, lazy: LazyGradient) -> Tensor:
        """The gradient as zeros, without anything being computed."""
        base = self.base
        sources, self.sources = self.sources, ()
        self.forget()
        self.disarm()
        for source in sources:
            source.drop({self.key})
        with torch.no_grad():
            zeros = (
                torch.zeros_like(parameter, dtype=_dtype(parameter))
                if base is None
                else base.zero_()
            )
        if parameter.grad is lazy:
            parameter.grad = zeros
        del base
        self.hand_over(lazy, zeros)
        return lazy.value() if isinstance(lazy, LazyGradient) else lazy


_slot = SimpleNamespace(lazy=object())
OURS = getrefcount(_slot.lazy)
"""How many references Python has to what is only a slot's, its being counted included."""


def _gone(slot: weakref.ref[GradientSlot], _: Any) -> None:
    """Weak-reference callback of a lazy gradient that was freed."""
    found = slot()
    if found is not None and found.state is ARMED:
        for source in found.sources:
            source.sweep()


def _dtype(parameter: Tensor) -> torch.dtype:
    """Dtype of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _nobody() -> None:
    return None
