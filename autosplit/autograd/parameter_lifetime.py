"""Ownership of pending work by parameters, which may outlive their split module."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from torch import Tensor

_ATTRIBUTE = "_autosplit_pending"

T = TypeVar("T")


class Keepers(Generic[T]):
    """The parameters that keep one owner of pending work alive."""

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[Tensor]] = []

    def add(self, parameter: Tensor, owner: T) -> None:
        """Let the owner live at least as long as the parameter."""
        kept = parameter.__dict__.get(_ATTRIBUTE)
        if not isinstance(kept, _Owners):
            kept = parameter.__dict__[_ATTRIBUTE] = _Owners()
        if self not in kept.by_keepers:
            kept.by_keepers[self] = owner
            self._parameters.append(weakref.ref(parameter))

    def release(self) -> None:
        """Have no parameter keep the owner any more."""
        for reference in self._parameters:
            parameter = reference()
            kept = None if parameter is None else parameter.__dict__.get(_ATTRIBUTE)
            if parameter is not None and isinstance(kept, _Owners):
                kept.by_keepers.pop(self, None)
                if not kept.by_keepers:
                    del parameter.__dict__[_ATTRIBUTE]
        self._parameters.clear()


class _Owners:
    """Attribute of a parameter: the owners that it keeps alive."""

    def __init__(self) -> None:
        self.by_keepers: dict[Keepers[Any], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a parameter has no gradient; this is what any unpickler may load."""
        return OrderedDict, ()
