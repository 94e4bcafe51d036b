"""A gradient that is computed when it is first used.

While weight gradients are pending, ``.grad`` of each parameter holds one of these. Whatever uses
its values has everything computed that the gradient waits for, and then gets the real one.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.accumulate_grad import (
    ZERO_ALL,
    above_autograd,
    as_it_is,
    own_gradient,
    tensor_users,
    wrapper,
)
from autosplit.torch_internals.backward_task import in_transform
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten
from autosplit.torch_internals.tracing import in_compiler


class Source(Protocol):
    """Whoever can compute pending weight gradients."""

    def compute_for(self, parameter: Tensor) -> None:
        """Compute all that is pending and that this parameter waits for."""

    def waiting(self) -> Collection[int]:
        """The parameters (their ``id``) that something is pending for."""

    def drop(self, parameters: Collection[int]) -> None:
        """Nobody wants what is pending for these (their ``id``) any more."""

    def sweep(self) -> None:
        """Drop what is pending for every gradient that is gone."""


class State(enum.Enum):
    """Whether ``.grad`` holds the lazy gradient."""

    IDLE = enum.auto()
    ARMED = enum.auto()
    COMPUTING = enum.auto()  # ``.grad`` is the sum so far
    USED = enum.auto()  # idle, and the lazy gradient means the real one to whoever holds it


# Looked up in an enumeration, they take longer than all the rest.
IDLE, ARMED, COMPUTING, USED = State


class Slot:
    """The gradient of one parameter, of which a part is pending.

    The lazy gradient must not hold its slot, which holds what is pending: what ``.grad`` refers to
    is hidden from Python's garbage collector.

    Attributes:
        parameter: whose, while it lives.
        key: its ``id``.
        state: whether ``.grad`` holds the lazy gradient.
        lazy: the lazy gradient, kept to be used again; None where its end is to be noticed.
        ref: the same, not kept.
        base: what ``.grad`` was before, to which the pending part will be added.
        aside: what ``.grad`` is meanwhile, while a gradient is computed that somebody holds though
            it is not in ``.grad`` any more.
        sources: who has something pending, in the order in which they began.
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
        self.sources: tuple[Source, ...] = ()
        self.dense = True
        self.failure: BaseException | None = None
        self.hidden = False
        self.out: Tensor | None = None

    @staticmethod
    def of(parameter: Tensor) -> Slot | None:
        """The slot behind what is in the parameter's ``.grad``."""
        lazy = parameter.grad
        found = _pending(lazy) if type(lazy) is LazyGradient else None
        return found[0] if found is not None and found[1] is parameter else None

    def current(self) -> LazyGradient | None:
        """The lazy gradient, while it lives."""
        return self.ref() if self.lazy is None else self.lazy

    def installed(self, parameter: Tensor) -> bool:
        """Whether the lazy gradient is in ``.grad``."""
        lazy = self.ref() if self.lazy is None else self.lazy
        return (lazy is not None and parameter.grad is lazy) or self.hidden

    def arm(self, parameter: Tensor, base: Tensor | None) -> None:
        """Put the lazy gradient in the place of what is in ``.grad``."""
        lazy = self.ref() if self.lazy is None else self.lazy
        self.base, self.state = base, ARMED
        if lazy is not None:
            try:
                parameter.grad = lazy
                self.conceal(parameter)
                return
            except RuntimeError:  # the parameter has another shape, dtype or device by now
                self.forget()
        lazy = self.lazy = wrapper(LazyGradient, parameter, _dtype(parameter))
        lazy._slot = weakref.ref(self)
        self.watch(lazy)
        parameter.grad = lazy
        self.conceal(parameter)

    def conceal(self, parameter: Tensor) -> None:
        """Take the lazy gradient out of ``.grad`` where it is to be hidden."""
        if self.hidden:
            self.out, parameter.grad = parameter.grad, None

    def reveal(self) -> None:
        """Put it back."""
        lazy, self.out, self.hidden = self.out, None, False
        parameter = self.parameter()
        still = self.state is ARMED and lazy is not None and self.current() is lazy
        if still and parameter is not None and parameter.grad is None:
            parameter.grad = lazy

    def watch(self, lazy: LazyGradient) -> None:
        """Notice its end, unless it is kept."""
        self.ref = weakref.ref(lazy, partial(_gone, lazy._slot))

    def forget(self) -> None:
        """Whoever holds the lazy gradient keeps it; the next one is another."""
        self.lazy, self.ref = None, _nobody

    def reuse(self) -> None:
        """Keep the lazy gradient for the next step, unless somebody still holds it."""
        self.state = IDLE
        if self.held():
            self.forget()
        elif self.lazy is not None:
            self.lazy._real = None

    def disarm(self) -> None:
        """Nothing is pending any more."""
        self.state = IDLE
        self.base = self.failure = None

    def held(self) -> bool:
        """Whether somebody holds the lazy gradient, which is not in ``.grad``."""
        if self.lazy is None:
            return self.ref() is not None
        return getrefcount(self.lazy) > OURS or tensor_users(self.lazy) > 1

    def compute(self) -> None:
        """Have all sources compute what is pending.

        Raises:
            SplitError: a part is lost.
        """
        _refuse_failed(self)
        # What tracing and torch.func set up for this thread is not meant for W.
        if in_compiler() or in_transform():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._compute).result()
        else:
            self._compute()
        _refuse_failed(self)

    def _compute(self) -> None:
        parameter = self.parameter()
        if parameter is not None:
            for source in self.sources:
                source.compute_for(parameter)

    def add(self, parameter: Tensor, gradient: Tensor, **how: Any) -> None:
        """Add to the gradient what did not wait."""
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
        lazy._real = zeros
        if parameter.grad is lazy:
            parameter.grad = zeros
        return zeros


class LazyGradient(Tensor):
    """What ``.grad`` holds while a part of the gradient is pending: any use of its values computes
    it. It goes on to mean the gradient that it stood for, whatever becomes of ``.grad``.
    """

    _slot: weakref.ref[Slot]
    _real: Tensor | None = None

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN and all(map(_is_known, args[:1])):
            with as_it_is():
                return func(*args, **kwargs)
        if func is Tensor.zero_ and _is_dense(args[0]):
            return _zeroed(args[0])
        if func is ZERO_ALL:
            args = ([_zeroed(t) if _is_dense(t) else t for t in args[0]],)
        off = func is Tensor.requires_grad_ and not any((*args[1:], *kwargs.values()))
        if off and _is_known(args[0]):
            return args[0]
        args, kwargs = _computed((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What comes from C++: autograd that accumulates a gradient that did not wait, a
        collective.
        """
        kwargs = kwargs or {}
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], LazyGradient):
            lazy, found = args[0], _pending(args[0])
            if found is not None and not isinstance(args[1], LazyGradient):
                slot, parameter = found
                slot.add(parameter, args[1], **kwargs)
                return lazy
        with above_autograd():
            args, kwargs = _computed((args, kwargs))
        return func(*args, **kwargs)

    def value(self) -> Tensor:
        """The gradient itself, computed if need be.

        Raises:
            SplitError: it cannot be computed, or not any more, or not here.
        """
        if self._real is not None:
            return self._real
        found = _pending(self)
        if found is None:
            raise SplitError(
                "a gradient that was taken from .grad while a part of it was pending, and never "
                "used: what was pending has been discarded since, a hook has taken it, or its "
                "parameter is gone. Call backward_weight() before that, or read .grad again"
            )
        slot, _ = found
        slot.compute()
        if self._real is None:
            raise SplitError(
                "a gradient that was taken from .grad while a part of it was pending was used "
                "while that part is being computed, by a hook, say; read .grad in the hook instead"
            )
        return self._real


_slot = SimpleNamespace(lazy=object())
OURS = getrefcount(_slot.lazy)
"""How many references Python has to what is only a slot's, its being counted included."""


def _refuse_failed(slot: Slot) -> None:
    if slot.failure is not None:
        raise SplitError(
            f"a part of this gradient is lost, because computing it failed: {slot.failure}\n"
            "Call optimizer.zero_grad() and repeat the step"
        ) from slot.failure


def _pending(lazy: LazyGradient) -> tuple[Slot, Tensor] | None:
    """Its slot and parameter, while a part of it is to come."""
    slot = lazy._slot()
    if lazy._real is not None or slot is None or slot.current() is not lazy:
        return None
    parameter = slot.parameter()
    if parameter is None or slot.state is IDLE:
        return None
    return slot, parameter


def _is_known(lazy: Any) -> bool:
    """Whether shape, dtype and the like are what they will be."""
    found = _pending(lazy) if isinstance(lazy, LazyGradient) else None
    if found is None:
        return False
    slot, parameter = found
    fixed = getattr(parameter, "grad_dtype", parameter.dtype) is not None
    return fixed and (slot.base is None or not slot.base.requires_grad)


def _is_dense(lazy: Any) -> bool:
    """Whether it is known that the gradient will be strided."""
    found = _pending(lazy) if isinstance(lazy, LazyGradient) else None
    if found is None:
        return False
    slot, _ = found
    return (
        slot.dense
        and slot.state is ARMED
        and slot.failure is None
        and (slot.base is None or slot.base.layout is torch.strided)
    )


def _zeroed(lazy: LazyGradient) -> Tensor:
    found = _pending(lazy)
    return lazy.value() if found is None else found[0].zero(found[1], lazy)


def _computed(tree: Any) -> Any:
    """The same with real gradients in the place of lazy ones."""
    leaves, spec = tree_flatten(tree)
    found = [leaf.value() if isinstance(leaf, LazyGradient) else leaf for leaf in leaves]
    return tree_unflatten(found, spec)


def _gone(slot: weakref.ref[Slot], _: Any) -> None:
    """The lazy gradient is not in ``.grad`` any more, nor anywhere else."""
    found = slot()
    if found is not None and found.state is ARMED:
        for source in found.sources:
            source.sweep()


def _dtype(parameter: Tensor) -> torch.dtype:
    """Of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _nobody() -> None:
    return None


# What is asked of gradients that are then replaced, or before they are used; everything else
# computes them, as its answer may differ.
_ANY: Any = Tensor
_KNOWN = {
    *[
        getattr(_ANY, name).__get__
        for name in ("shape", "dtype", "device", "grad_fn", "requires_grad", "is_leaf")
    ],
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
}
