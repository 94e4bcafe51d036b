"""Where checkpoints were before they had a folder of their own; goes with the next version."""

from __future__ import annotations

import warnings
from typing import Any

from autosplit import checkpoint

_MOVED = ("load_checkpoint", "save_checkpoint")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"autosplit.planner.checkpoint.{name} is now autosplit.checkpoint.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(checkpoint, name)
