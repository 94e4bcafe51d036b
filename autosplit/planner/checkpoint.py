"""Where checkpoints were before they had a folder of their own; goes with the next version."""

from __future__ import annotations

from typing import Any

from autosplit import checkpoint
from autosplit.checkpoint.naming import Mismatch
from autosplit.text.moved_names import moved_names


def _load_checkpoint(*arguments: Any, **options: Any) -> tuple[Mismatch, ...]:
    """As it was here, it returned what did not match, and left random generators alone."""
    return checkpoint.load_checkpoint(*arguments, **{"generators": False, **options}).mismatches


__getattr__ = moved_names(
    __name__,
    {
        "load_checkpoint": ("autosplit.checkpoint.load_checkpoint", _load_checkpoint),
        "save_checkpoint": ("autosplit.checkpoint.save_checkpoint", checkpoint.save_checkpoint),
    },
)
