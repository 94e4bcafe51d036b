"""``LazyGradient``: a tensor subclass in ``.grad`` that runs W when its values are first used.

While weight gradients are pending, ``.grad`` of each parameter holds one of these. Any operator on
it has everything computed that the gradient waits for, and gets the real gradient instead.

State of one parameter's ``.grad`` while a part of the gradient is pending.
"""

from __future__ import annotations

import enum
import weakref
from concurrent.futures import ThreadPoolExecutor
from sys import getrefcount
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    in_compiler,
    in_transform,
    memoryless_tensor,
    outside_dispatch,
    own_gradient,
    tensor_users,
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
        args, kwargs = _computed((args, kwargs or {}))
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


def _computed(tree: Any) -> Any:
    """A pytree with every lazy gradient replaced by the real one."""
    leaves, spec = tree_flatten(tree)
    found = [leaf.value() if isinstance(leaf, LazyGradient) else leaf for leaf in leaves]
    return tree_unflatten(found, spec)


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
        lazy: the lazy gradient, kept to be used again, as making one takes longer than all else.
        base: what ``.grad`` was before, to which the pending part will be added.
        aside: what ``.grad`` is meanwhile, while a gradient is computed that somebody holds though
            it is not in ``.grad`` any more.
        sources: queues with gradients pending, in the order in which they began.
        failure: why a part of the gradient is lost.
        hidden: whether it is kept out of ``.grad``, see ``LazyGradients.hide``.
    """

    __slots__ = (
        "__weakref__",
        "aside",
        "base",
        "failure",
        "hidden",
        "key",
        "lazy",
        "parameter",
        "sources",
        "state",
    )

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.key = id(parameter)
        self.state = IDLE
        self.lazy: LazyGradient | None = None
        self.base: Tensor | None = None
        self.aside: list[Tensor | None] | None = None
        self.sources: tuple[PendingQueue, ...] = ()
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
        return None if self.lazy is not lazy or self.state is IDLE else self.parameter()

    def installed(self, parameter: Tensor) -> bool:
        """Whether the lazy gradient is in ``.grad``."""
        return self.hidden or (self.lazy is not None and parameter.grad is self.lazy)

    def arm(self, parameter: Tensor, base: Tensor | None) -> None:
        """Put the lazy gradient into ``.grad``, in the place of ``base``."""
        self.base, self.state = base, ARMED
        if self.lazy is not None:
            try:
                parameter.grad = self.lazy
                return
            except RuntimeError:  # the parameter has another shape, dtype or device by now
                pass
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        lazy = self.lazy = memoryless_tensor(LazyGradient, parameter, dtype)
        lazy._slot = weakref.ref(self)
        parameter.grad = lazy

    def hand_over(self, real: Tensor) -> None:
        """Have the lazy gradient, which is referenced elsewhere, stand for the real one from now
        on; the next one is another object.
        """
        lazy, self.lazy = self.lazy, None
        if lazy is not None:
            lazy._real = real

    def disarm(self) -> None:
        """Note that nothing is pending any more."""
        self.state = IDLE
        self.base = self.failure = None

    def held(self) -> bool:
        """Whether the lazy gradient, which is not in ``.grad``, is referenced elsewhere."""
        if self.lazy is None:
            return False
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


_slot = SimpleNamespace(lazy=object())
OURS = getrefcount(_slot.lazy)
"""How many references Python has to what is only a slot's, its being counted included."""
