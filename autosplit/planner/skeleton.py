"""Where ``meta_model`` was under the name ``skeleton``; goes with the next version."""

from __future__ import annotations

import warnings
from typing import Any

from autosplit.planner.meta_init.meta_model import meta_model


def __getattr__(name: str) -> Any:
    if name != "skeleton":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "autosplit.planner.skeleton.skeleton is now autosplit.planner.meta_model",
        DeprecationWarning,
        stacklevel=2,
    )
    return meta_model
