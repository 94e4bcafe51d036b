"""``LazyGradient``: a tensor subclass in ``.grad`` that runs W when its values are first used.

While weight gradients are pending, ``.grad`` of each parameter holds one of these. Any operator on
it has everything computed that the gradient waits for, and gets the real gradient instead.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    ZERO_ALL,
    outside_dispatch,
    without_torch_function,
)
from autosplit.torch_internals.dtensor import dtensor_class, is_dtensor
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from .gradient_slot import GradientSlot


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
