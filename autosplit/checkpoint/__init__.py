"""Checkpoints under the names of the whole model, for any number of stages, or none."""

from __future__ import annotations

from .loading import Loaded, load_checkpoint, read_progress
from .reading import read_checkpoint
from .saving import PendingSave, save_checkpoint

__all__ = [
    "Loaded",
    "PendingSave",
    "load_checkpoint",
    "read_checkpoint",
    "read_progress",
    "save_checkpoint",
]
