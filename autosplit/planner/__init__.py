"""From a whole model to balanced stages."""

from __future__ import annotations

from autosplit.planner.partitioning import partition
from autosplit.planner.plan import Plan
from autosplit.planner.stages import Partition, cut
from autosplit.planner.whole import WholeModel

__all__ = ["Partition", "Plan", "WholeModel", "cut", "partition"]
