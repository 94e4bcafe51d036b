"""``LazyGradient``: a tensor subclass in ``.grad`` that runs W when its values are first used.

While weight gradients are pending, ``.grad`` of each parameter holds one of these. Any operator on
it has everything computed that the gradient waits for, and gets the real gradient instead.

State of one parameter's ``.grad`` while a part of the gradient is pending.
"""

from __future__ import annotations

import enum
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from sys import getrefcount
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    ZERO_ALL,
    exchanged,
    in_compiler,
    in_transform,
    memoryless_tensor,
    outside_dispatch,
    own_gradient,
    tensor_users,
    without_torch_function,
)
from autosplit.torch_internals.dtensor import dtensor_class, is_dtensor
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from .pending import PendingQueue

_CLASS: Any = object.__dict__["__class__"]


class LazyGradient(Tensor):
    """Placeholder of a gradient of which a part is pending; any use of its values computes that.
    It goes on to mean the gradient that it stood for, whatever becomes of ``.grad``.
    """

    _slot: weakref.ref[GradientSlot]
    _real: Tensor | None = None

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and all(map(_has_final_metadata, args[:1])):
            with without_torch_function():
                return func(*args, **kwargs)
        if func is Tensor.zero_ and _is_strided(args[0]):
            return _zeroed(args[0])
        if func is ZERO_ALL:
            args = ([_zeroed(t) if _is_strided(t) else t for t in args[0]],)
        off = func is Tensor.requires_grad_ and not any((*args[1:], *kwargs.values()))
        if off and _has_final_metadata(args[0]):
            return args[0]
        args, kwargs = _computed((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operators called from C++: accumulation of a gradient that was not deferred, a
        collective.
        """
        kwargs = kwargs or {}
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], LazyGradient):
            lazy, found = args[0], pending(args[0])
            if found is not None and not isinstance(args[1], LazyGradient):
                slot, parameter = found
                slot.add(parameter, args[1], **kwargs)
                return lazy
        with outside_dispatch():
            args, kwargs = _computed((args, kwargs))
        return func(*args, **kwargs)

    @property
    def __class__(self) -> type:
        """``isinstance`` of a DTensor's says that it is one, as of the real gradient."""
        return dtensor_class() if is_dtensor(self._stands_for) else type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        _CLASS.__set__(self, kind)

    @property
    def _stands_for(self) -> Tensor | None:
        """The parameter, or the real gradient where that is there."""
        found = pending(self)
        return self._real if found is None else found[1]

    def __getattr__(self, name: str) -> Any:
        """What only the gradient of a DTensor has: placements, a mesh, a local part."""
        if name.startswith("__") or name == "_slot":
            raise AttributeError(name)
        stands_for = self._stands_for
        if not is_dtensor(stands_for):
            raise AttributeError(f"{type(stands_for).__name__!r} object has no attribute {name!r}")
        return getattr(self.value(), name)

    def value(self) -> Tensor:
        """The gradient itself, computed if need be.

        Raises:
            SplitError: it cannot be computed, or not any more, or not here.
        """
        if self._real is not None:
            return self._real
        found = pending(self)
        if found is None:
            raise SplitError(
                "a gradient that was taken from .grad while a part of it was pending, and never "
                "used: what was pending has been discarded since, a hook has taken it, or its "
                "parameter is gone. Call backward_weight() before that, or read .grad again"
            )
        slot, _ = found
        slot.compute()
        if not isinstance(self, LazyGradient):
            return self  # the real one itself, see ``GradientSlot.hand_over``
        if self._real is None:
            raise SplitError(
                "a gradient that was taken from .grad while a part of it was pending was used "
                "while that part is being computed, by a hook, say; read .grad in the hook "
                "instead. Those of a module of fully_shard are not there before they are reduced, "
                "which set_requires_gradient_sync(False) puts off"
            )
        return self._real


def pending(lazy: LazyGradient) -> tuple[GradientSlot, Tensor] | None:
    """Slot and parameter of a lazy gradient of which a part is still to be computed."""
    slot = lazy._slot()
    if lazy._real is not None or slot is None:
        return None
    parameter = slot.awaited_by(lazy)
    return None if parameter is None else (slot, parameter)


def _has_final_metadata(lazy: Any) -> bool:
    """Whether shape, dtype and the like are those of the real gradient."""
    found = pending(lazy) if isinstance(lazy, LazyGradient) else None
    return found is not None and found[0].has_final_metadata(found[1])


def _is_strided(lazy: Any) -> bool:
    """Whether the real gradient is known to be strided."""
    found = pending(lazy) if isinstance(lazy, LazyGradient) else None
    return found is not None and found[0].is_strided


def _zeroed(lazy: LazyGradient) -> Tensor:
    """The gradient as zeros; what is pending for it alone is dropped."""
    found = pending(lazy)
    return lazy.value() if found is None else found[0].zero(found[1], lazy)


def _computed(tree: Any) -> Any:
    """A pytree with every lazy gradient replaced by the real one."""
    leaves, spec = tree_flatten(tree)
    found = [leaf.value() if isinstance(leaf, LazyGradient) else leaf for leaf in leaves]
    return tree_unflatten(found, spec)


# Metadata read before gradients are used, or of those that are then replaced; everything else
# computes them, as its answer may differ.
_ANY: Any = Tensor
_METADATA = {
    *[
        getattr(_ANY, name).__get__
        for name in ("shape", "dtype", "device", "grad_fn", "requires_grad", "is_leaf")
    ],
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
}


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
        self.sources: tuple[PendingQueue, ...] = ()
        self.dense = True
        self.failure: BaseException | None = None
        self.hidden = False

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
        return self.hidden or (lazy is not None and parameter.grad is lazy)

    def arm(self, parameter: Tensor, base: Tensor | None) -> None:
        """Put the lazy gradient into ``.grad``, in the place of ``base``."""
        lazy = self.ref() if self.lazy is None else self.lazy
        self.base, self.state = base, ARMED
        if lazy is not None:
            try:
                parameter.grad = lazy
                return
            except RuntimeError:  # the parameter has another shape, dtype or device by now
                self.forget()
        lazy = self.lazy = memoryless_tensor(LazyGradient, parameter, _dtype(parameter))
        lazy._slot = weakref.ref(self)
        self.watch(lazy)
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
