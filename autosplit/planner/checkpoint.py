"""Where checkpoints were before they had a folder of their own; goes with the next version."""

from __future__ import annotations

import warnings
from typing import Any

from autosplit import checkpoint
from autosplit.checkpoint.naming import Mismatch


def __getattr__(name: str) -> Any:
    found = {"load_checkpoint": _load_checkpoint, "save_checkpoint": checkpoint.save_checkpoint}
    if name not in found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"autosplit.planner.checkpoint.{name} is now autosplit.checkpoint.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return found[name]


def _load_checkpoint(*arguments: Any, **options: Any) -> tuple[Mismatch, ...]:
    """As it was here, it returned what did not match, and left random generators alone."""
    return checkpoint.load_checkpoint(*arguments, **{"generators": False, **options}).mismatches
