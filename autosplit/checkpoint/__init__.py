"""Checkpoints under the names of the whole model; a trainer with any number of stages, or an uncut
model, can load them.
"""

from __future__ import annotations

from .export import export_safetensors
from .loading import Loaded, load_checkpoint, read_planning, read_progress
from .manager import CheckpointManager
from .reading import read_checkpoint
from .saving import PendingSave, save_checkpoint

__all__ = [
    "CheckpointManager",
    "Loaded",
    "PendingSave",
    "export_safetensors",
    "load_checkpoint",
    "read_checkpoint",
    "read_planning",
    "read_progress",
    "save_checkpoint",
]
