"""From a whole model to balanced stages."""

from __future__ import annotations

from autosplit.planner.meta_init.meta_model import meta_model
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.model.stages import Partition, cut
from autosplit.planner.plan.partitioning import partition
from autosplit.planner.plan.plan import Plan

__all__ = ["Partition", "Plan", "WholeModel", "cut", "meta_model", "partition"]
