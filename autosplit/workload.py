"""Where ``Workload`` was before ``autosplit.compare`` had it; goes with the next version."""

from __future__ import annotations

import warnings
from typing import Any

from . import compare


def __getattr__(name: str) -> Any:
    if name not in compare.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"autosplit.workload.{name} is now autosplit.compare.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(compare, name)
