"""``LazyGradient``: a tensor subclass in ``.grad`` that runs W when its values are first used.

    .grad ──> LazyGradient ──weak──> GradientSlot ──> PendingQueue (runs W)
                                          └──> grad: the sum of the computed parts

While weight gradients are pending, ``.grad`` of each parameter is a ``LazyGradient``. Any operator
on it first computes all pending parts, and then runs on the real gradient. Shape, dtype and device
need no computation, and ``zero_()`` drops the pending parts. A ``GradientSlot`` holds the state of
one parameter's ``.grad`` while parts are pending.
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
    in_compiler,
    in_transform,
    memoryless_tensor,
    outside_dispatch,
    without_torch_function,
)
from autosplit.torch_internals.dtensor import dtensor_class, is_dtensor
from autosplit.torch_internals.gradients import ZEROING, add_gradient
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten
from autosplit.torch_internals.state import tensor_users

if TYPE_CHECKING:
    from .pending import PendingQueue

_CLASS: Any = object.__dict__["__class__"]

_T: Any = Tensor
_METADATA = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cpu")),
    *(getattr(_T, name).__get__ for name in ("is_cuda", "itemsize", "grad_fn", "requires_grad")),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.is_floating_point, _T.is_complex),
}
"""Functions whose results do not depend on a gradient's values; functions of Tensor are compared by
equality.
"""


class LazyGradient(Tensor):
    """Placeholder of a gradient with a pending part; any use of its values computes that part.

    A reference to a lazy gradient stays valid: after the computation it stands for the real
    gradient of its step, even if ``.grad`` has changed since.
    """

    _slot: weakref.ref[GradientSlot]
    _real: Tensor | None = None
    _heir: tuple[LazyGradient, PendingQueue] | None = None

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and args[0]._is_plain:
            with without_torch_function():
                return func(*args, **kwargs)
        if func is _T.requires_grad_ and args[1:] == (False,) and args[0]._is_plain:
            return args[0]
        if func in ZEROING:
            for lazy in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                target = pending_slot(lazy) if isinstance(lazy, LazyGradient) else None
                if target is not None:
                    target[0].zero(target[1])
        args, kwargs = _with_real_gradients((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle operators that are called from C++, such as autograd's accumulation or a
        collective.

        Accumulating a gradient that was not deferred adds it to the slot, without computing W.
        """
        kwargs = kwargs or {}
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], LazyGradient):
            lazy, target = args[0], pending_slot(args[0])
            if target is not None and not isinstance(args[1], LazyGradient):
                slot, parameter = target
                slot.accumulate_now(parameter, args[1], **kwargs)
                return lazy
        with outside_dispatch():
            args, kwargs = _with_real_gradients((args, kwargs))
        return func(*args, **kwargs)

    @property
    def __class__(self) -> type:
        """The class for ``isinstance``: DTensor if the real gradient is or will be a DTensor, else
        LazyGradient.
        """
        return dtensor_class() if is_dtensor(self._stands_for) else type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        _CLASS.__set__(self, kind)

    @property
    def _stands_for(self) -> Tensor | None:
        """The tensor that this gradient behaves like: the parameter while a part is pending, and
        the real gradient afterwards.
        """
        target = pending_slot(self)
        return self._real if target is None else target[1]

    @property
    def _is_plain(self) -> bool:
        """Whether the gradient has a pending part, and the sum before that part has no autograd
        history.
        """
        target = pending_slot(self)
        if target is None:
            return False
        earlier = target[0].grad
        return earlier is None or not earlier.requires_grad

    def __getattr__(self, name: str) -> Any:
        """Attributes that only a DTensor has: placements, device mesh, local tensor."""
        if name.startswith("__") or name == "_slot":
            raise AttributeError(name)
        stands_for = self._stands_for
        if not is_dtensor(stands_for):
            raise AttributeError(f"{type(stands_for).__name__!r} object has no attribute {name!r}")
        return getattr(self.value(), name)

    def value(self) -> Tensor:
        """Return the real gradient; compute it first if a part is pending.

        Raises:
            SplitError: the pending part was discarded, its computation failed, or the computation
                itself uses the gradient.
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
                "the computation of a weight gradient reads this gradient itself, which was taken "
                "from .grad before: call backward_weight() before you read .grad"
            )
        raise SplitError(
            "a gradient that was read from .grad while a part of it was pending has no value: the "
            "pending part was discarded, a hook consumed it, or its parameter was freed. Call "
            "backward_weight() before that happens, or read .grad again. Gradients of a module of "
            "fully_shard have no value until they are reduced, which "
            "set_requires_gradient_sync(False) postpones"
        )


def pending_slot(lazy: LazyGradient) -> tuple[GradientSlot, Tensor] | None:
    """The slot and the parameter of a lazy gradient; None if no part of it is pending."""
    if lazy._heir is not None:
        return pending_slot(lazy._heir[0])
    slot = lazy._slot()
    if lazy._real is not None or slot is None:
        return None
    parameter = slot.parameter() if slot.armed and slot.lazy is lazy else None
    return None if parameter is None else (slot, parameter)


def _with_real_gradients(tree: Any) -> Any:
    """The pytree with every lazy gradient replaced by its real gradient."""
    leaves, spec = tree_flatten(tree)
    values = [leaf.value() if isinstance(leaf, LazyGradient) else leaf for leaf in leaves]
    return tree_unflatten(values, spec)


_SLOT_LOCK = threading.RLock()
"""Lock for reading and changing slots and queues, and for adding a gradient to a slot.

Without it, two threads could both find a slot empty and one gradient would be lost. No thread
computes gradients while it holds the lock.
"""


class GradientSlot:
    """State of one parameter's ``.grad`` while a part of the gradient is pending in a queue.

    The lazy gradient refers to its slot weakly. The slot refers to the pending work, and Python's
    garbage collector cannot see references from ``.grad``, so a cycle would never be freed.

    ``.grad`` changes from the lazy gradient to the real one in one assignment, so another thread
    never sees a partial sum. Partial sums are in the slot's ``grad``. It is named like a tensor's
    ``.grad``, so that the same code accumulates into either.

    Attributes:
        queue: the queue with the pending part.
        parameter: weak reference to the parameter.
        key: ``id`` of the parameter.
        armed: whether the lazy gradient stands for a pending part.
        lazy: the lazy gradient. It is reused, because its construction is expensive.
        grad: the value of ``.grad`` before the pending part, and the sum while parts are added.
        failure: the error by which a part of the gradient was lost; None if nothing was lost.
        hidden: whether the lazy gradient is at present removed from ``.grad``, see
            ``PendingQueue.hide_lazy_gradients``.
    """

    __slots__ = (
        "__weakref__",
        "armed",
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
        self.armed = self.hidden = False

    @staticmethod
    def of(parameter: Tensor) -> GradientSlot | None:
        """The slot of the lazy gradient in a parameter's ``.grad``; None if there is no lazy
        gradient.
        """
        lazy = parameter.grad
        target = pending_slot(lazy) if type(lazy) is LazyGradient else None
        return target[0] if target is not None and target[1] is parameter else None

    def is_present(self) -> bool:
        """Whether the lazy gradient still exists and can be used.

        It exists while it is in ``.grad``, referenced elsewhere, or being computed.
        """
        parameter = self.parameter()
        return parameter is not None and (
            parameter.grad is self.lazy
            or self.hidden
            or self in self.queue.computed
            or (self.failure is None and self._is_referenced())
        )

    def new_lazy(self, parameter: Tensor) -> LazyGradient:
        """Create the lazy gradient of the parameter."""
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        lazy = self.lazy = memoryless_tensor(LazyGradient, parameter, dtype)
        lazy._slot = weakref.ref(self)
        return lazy

    def revive(self, parameter: Tensor) -> None:
        """Keep the gradient usable after Python has begun to free the queue.

        Freeing the queue clears weak references to its slots. So a new lazy gradient goes into
        ``.grad``. The old lazy gradient gets references to the new one and to the queue, which keep
        both alive.
        """
        self.parameter, old_lazy = weakref.ref(parameter), self.lazy
        if old_lazy is not None:
            heir = self.new_lazy(parameter)
            old_lazy._heir = heir, self.queue
            if parameter.grad is old_lazy:
                parameter.grad = heir

    @staticmethod
    def resolve(slots: Iterable[GradientSlot]) -> None:
        """Replace lazy gradients without pending parts by the real ones.

        The real gradient goes into ``.grad``. A lazy gradient that is referenced elsewhere gets the
        real one as its value, and the slot does not reuse it. A gradient of which a part was lost
        stays lazy.
        """
        for slot in slots:
            if slot.failure is not None:
                continue
            parameter, lazy = slot.parameter(), slot.lazy
            try:
                # No other thread runs between the two: nothing in here lets Python change threads.
                if parameter is not None and (parameter.grad is lazy or slot.hidden):
                    parameter.grad = slot.grad
            except RuntimeError as error:  # the parameter's shape, dtype or device changed
                slot.failure = error
                continue
            # ``_is_referenced`` inlined, to save a call for each parameter and step.
            if lazy is not None and (getrefcount(lazy) > _OWN_REFERENCES or tensor_users(lazy) > 1):
                lazy._real, slot.lazy = slot.grad, None
            slot.armed, slot.grad = False, None

    def drop(self, parameter: Tensor | None = None) -> None:
        """Drop the pending part of the gradient.

        Args:
            parameter: if passed, its ``.grad`` is restored to the value before the pending part,
                and the lazy gradient is not reused.
        """
        if parameter is not None and (self.hidden or parameter.grad is self.lazy):
            parameter.grad = self.grad
        if parameter is not None or self._is_referenced():
            self.lazy = None
        self.armed, self.grad, self.failure = False, None, None

    def zero(self, parameter: Tensor) -> None:
        """Drop the pending part, and put zeros into ``.grad``, as ``zero_()`` of the real gradient
        would. Do nothing if the lazy gradient is no longer in use, or if a thread is computing it.
        """
        with _SLOT_LOCK:
            lazy = self.lazy
            if (
                lazy is None
                or parameter.grad is not lazy
                or self in self.queue.computed
                or is_dtensor(parameter)
            ):
                return
            dtype = lazy.dtype
            self.drop(parameter)
            self.queue.drop({self.key})
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            lazy._real = parameter.grad

    def _is_referenced(self) -> bool:
        """Whether an object other than the slot refers to the lazy gradient. Call it if the lazy
        gradient is not in ``.grad``.
        """
        lazy = self.lazy
        return lazy is not None and (getrefcount(lazy) > _OWN_REFERENCES or tensor_users(lazy) > 1)

    def compute(self) -> bool:
        """Compute all pending work of the slot's queue.

        Returns:
            True if this thread is already computing the work, further up in the call stack; nothing
            is computed then.

        Raises:
            SplitError: a part of the gradient is lost.
        """
        self._refuse_failed()
        # A fresh thread runs W without the tracing and torch.func state of this one.
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

    def accumulate_now(self, parameter: Tensor, gradient: Tensor, alpha: float = 1) -> None:
        """Add a gradient that was not deferred, times ``alpha``, to the slot."""
        gradient = gradient if alpha == 1 else gradient.mul(alpha)
        with _SLOT_LOCK:
            add_gradient(parameter, self if self.armed else parameter, gradient, True)


def _own_references(slot: Any) -> int:
    lazy = slot.lazy
    return getrefcount(lazy)


_OWN_REFERENCES = _own_references(SimpleNamespace(lazy=object()))
"""Reference count of an object that only a slot and a local variable refer to.

It includes the reference of the counting call. Measured, because Python 3.14 counts fewer.
"""
