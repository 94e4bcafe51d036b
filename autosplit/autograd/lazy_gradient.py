"""``LazyGradient``: a tensor subclass in ``.grad`` that runs W when its values are first used.

While weight gradients are pending, ``.grad`` of each parameter holds one of these. Any operator on
it has everything computed that the gradient waits for, and gets the real gradient instead.

State of one parameter's ``.grad`` while a part of the gradient is pending.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from sys import getrefcount
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    add_gradient,
    in_compiler,
    in_transform,
    memoryless_tensor,
    outside_dispatch,
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
    _heir: tuple[LazyGradient, PendingQueue] | None = None

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _with_real_gradients((args, kwargs or {}))
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
            lazy, target = args[0], pending_slot(args[0])
            if target is not None and not isinstance(args[1], LazyGradient):
                slot, parameter = target
                slot.add(parameter, args[1], **kwargs)
                return lazy
        with outside_dispatch():
            args, kwargs = _with_real_gradients((args, kwargs))
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
        target = pending_slot(self)
        return self._real if target is None else target[1]

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
        if self._heir is not None:
            return self._heir[0].value()
        inside = False
        while self._real is None and not inside:  # another thread may leave more to compute
            target = pending_slot(self)
            if target is None:
                break
            inside = target[0].compute()
        if self._real is not None:
            return self._real
        if inside:
            raise SplitError(
                "a gradient that was taken from .grad while a part of it was pending was used by "
                "what computes that part"
            )
        raise SplitError(
            "a gradient that was taken from .grad while a part of it was pending, and never used: "
            "what was pending has been discarded since, a hook has taken it, or its parameter is "
            "gone. Call backward_weight() before that, or read .grad again. Those of a module of "
            "fully_shard are not there before they are reduced, which "
            "set_requires_gradient_sync(False) puts off"
        )


def pending_slot(lazy: LazyGradient) -> tuple[GradientSlot, Tensor] | None:
    """Slot and parameter of a lazy gradient of which a part is still to be computed."""
    if lazy._heir is not None:
        return pending_slot(lazy._heir[0])
    slot = lazy._slot()
    if lazy._real is not None or slot is None:
        return None
    parameter = slot.parameter_of(lazy)
    return None if parameter is None else (slot, parameter)


def _with_real_gradients(tree: Any) -> Any:
    """A pytree with every lazy gradient replaced by the real one."""
    leaves, spec = tree_flatten(tree)
    values = [leaf.value() if isinstance(leaf, LazyGradient) else leaf for leaf in leaves]
    return tree_unflatten(values, spec)


_SLOT_LOCK = threading.RLock()
"""Held while slots and queues are looked at or changed, and while a gradient is added to a slot's:
two threads must not both find that there is none. Never while anything is computed.
"""


class GradientSlot:
    """State of one parameter's ``.grad`` while a part of the gradient is pending in a queue.

    The lazy gradient must not hold its slot, which holds what is pending: what ``.grad`` refers to
    is hidden from Python's garbage collector.

    ``.grad`` goes from the lazy gradient to the real one in one step: another thread that reads it
    finds either. The sum grows in ``grad`` here meanwhile, named as a parameter's, in whose place
    gradients are added to it.

    Attributes:
        queue: where the part is pending.
        parameter: whose, while it lives.
        key: its ``id``.
        armed: whether the lazy gradient stands for a part that is pending.
        lazy: the lazy gradient, kept to be used again, as making one takes longer than all else.
        grad: what ``.grad`` was before, to which the pending part is added.
        computing: whether pending parts are being computed.
        failure: why a part of the gradient is lost.
        hidden: whether it is kept out of ``.grad``, see ``PendingQueue.hidden``.
    """

    __slots__ = (
        "__weakref__",
        "armed",
        "computing",
        "failure",
        "grad",
        "hidden",
        "key",
        "lazy",
        "parameter",
        "queue",
    )

    def __init__(self, queue: PendingQueue, parameter: Tensor) -> None:
        self.queue = queue
        self.parameter = weakref.ref(parameter)
        self.key = id(parameter)
        self.lazy: LazyGradient | None = None
        self.grad: Tensor | None = None
        self.failure: BaseException | None = None
        self.armed = self.computing = self.hidden = False

    @staticmethod
    def of(parameter: Tensor) -> GradientSlot | None:
        """The slot of the lazy gradient in a parameter's ``.grad``."""
        lazy = parameter.grad
        target = pending_slot(lazy) if type(lazy) is LazyGradient else None
        return target[0] if target is not None and target[1] is parameter else None

    def parameter_of(self, lazy: LazyGradient) -> Tensor | None:
        """The parameter, where a part of the gradient that ``lazy`` stands for is pending."""
        return self.parameter() if self.armed and self.lazy is lazy else None

    def is_present(self) -> bool:
        """Whether somebody may still ask for the gradient: it is in ``.grad``, or referenced
        elsewhere; or it is being computed.
        """
        parameter = self.parameter()
        return parameter is not None and (
            parameter.grad is self.lazy
            or self.hidden
            or self.computing
            or (self.failure is None and self._is_referenced())
        )

    def new_lazy(self, parameter: Tensor) -> LazyGradient:
        """A new lazy gradient."""
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        lazy = self.lazy = memoryless_tensor(LazyGradient, parameter, dtype)
        lazy._slot = weakref.ref(self)
        return lazy

    def revive(self, parameter: Tensor) -> None:
        """Go on after Python has begun to free the queue, which clears weak references. Whoever
        holds the lazy gradient keeps the queue from now on, so another one is in ``.grad``.
        """
        self.parameter, old_lazy = weakref.ref(parameter), self.lazy
        if old_lazy is not None:
            heir = self.new_lazy(parameter)
            old_lazy._heir = heir, self.queue
            if parameter.grad is old_lazy:
                parameter.grad = heir

    @staticmethod
    def resolve(slots: Iterable[GradientSlot]) -> None:
        """Put the gradients, of which nothing is pending any more, where the lazy ones stand: into
        ``.grad``, and where somebody else refers to one; the next one is another object then.
        """
        for slot in slots:
            parameter, lazy = slot.parameter(), slot.lazy
            try:
                # No other thread runs between the two: nothing in here lets Python change threads.
                if parameter is not None and (parameter.grad is lazy or slot.hidden):
                    parameter.grad = slot.grad
            except RuntimeError as error:  # it has another shape, dtype or device by now
                slot.failure = error
                continue
            # As ``_is_referenced``, without a call for each parameter of every step.
            if lazy is not None and (getrefcount(lazy) > _OWN_REFERENCES or tensor_users(lazy) > 1):
                lazy._real, slot.lazy = slot.grad, None
            slot.armed, slot.grad = False, None

    def drop(self, parameter: Tensor | None = None) -> None:
        """Note that nothing is pending any more. ``parameter``: whose ``.grad`` is to be as it was
        before, and the lazy gradient nobody's.
        """
        if parameter is not None and (self.hidden or parameter.grad is self.lazy):
            parameter.grad = self.grad
        if parameter is not None or self._is_referenced():
            self.lazy = None
        self.armed, self.grad, self.failure = False, None, None

    def _is_referenced(self) -> bool:
        """Whether the lazy gradient, which is not in ``.grad``, is referenced elsewhere."""
        lazy = self.lazy
        return lazy is not None and (getrefcount(lazy) > _OWN_REFERENCES or tensor_users(lazy) > 1)

    def compute(self) -> bool:
        """Have all that is pending in the queue computed.

        Returns:
            Whether this thread is at it already.

        Raises:
            SplitError: a part is lost.
        """
        self._refuse_failed()
        # What tracing and torch.func set up for this thread is not meant for W.
        if in_compiler() or in_transform():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.queue.compute).result()
        else:
            self.queue.compute()
        self._refuse_failed()
        return self.queue.thread == threading.get_ident()

    def _refuse_failed(self) -> None:
        if self.failure is not None:
            raise SplitError(
                f"a part of this gradient is lost, because computing it failed: {self.failure}\n"
                "Call optimizer.zero_grad() and repeat the step"
            ) from self.failure

    def add(self, parameter: Tensor, gradient: Tensor, alpha: float = 1) -> None:
        """Accumulate a gradient that was not deferred."""
        gradient = gradient if alpha == 1 else gradient.mul(alpha)
        with _SLOT_LOCK:
            add_gradient(parameter, self if self.armed else parameter, gradient, True)


def _own_references(slot: Any) -> int:
    lazy = slot.lazy
    return getrefcount(lazy)


_OWN_REFERENCES = _own_references(SimpleNamespace(lazy=object()))
"""How many references Python has to what is only a slot's and a variable's, its being counted
included: Python 3.14 counts fewer of these than those before it.
"""
