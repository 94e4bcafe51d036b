"""Cut a whole model into balanced stages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosplit.planner.captured_model import WholeModel
from autosplit.planner.cutting import Partition, cut
from autosplit.planner.meta_model import meta_model

if TYPE_CHECKING:
    from autosplit.trainer.plan import Plan, partition

__all__ = ["Partition", "Plan", "WholeModel", "cut", "meta_model", "partition"]


def __getattr__(name: str) -> Any:
    """Import plans at their first use, because they import from this folder."""
    if name not in ("Plan", "partition"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("autosplit.trainer.plan"), name)
    return value
