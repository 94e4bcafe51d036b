"""From a whole model to balanced stages."""

from __future__ import annotations

from autosplit.planner.captured_model import WholeModel
from autosplit.planner.cutting import Partition, cut
from autosplit.planner.meta_model import meta_model
from autosplit.planner.plan import Plan, partition

__all__ = ["Partition", "Plan", "WholeModel", "cut", "meta_model", "partition"]
