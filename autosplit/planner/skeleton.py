"""Where ``meta_model`` was under the name ``skeleton``; goes with the next version."""

from __future__ import annotations

from autosplit.planner.meta_init.meta_model import meta_model
from autosplit.text.moved_names import moved_names

__getattr__ = moved_names(__name__, {"skeleton": ("autosplit.planner.meta_model", meta_model)})
