"""Public names that have moved: found where they were, with a warning that says where to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved_names(module: str, names: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module whose names are elsewhere now.

    Args:
        module: the full name of the old module.
        names: by name, where it is now, in words, and what it is.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        where, found = names[name]
        warnings.warn(f"{module}.{name} is now {where}", DeprecationWarning, stacklevel=2)
        return found

    return find
