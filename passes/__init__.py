"""Graph passes: joint forward/backward graph -> forward | backward_input | backward_weight.

Imports torch and nothing of autosplit.
"""

from .errors import PassError
from .graph import Kind, Role, SplitGraphs
from .manager import PASSES, Pass, run
from .memory_policy import MEMORY, CollectiveCosts, Memory, memory_setting

__all__ = [
    "MEMORY",
    "PASSES",
    "CollectiveCosts",
    "Kind",
    "Memory",
    "Pass",
    "PassError",
    "Role",
    "SplitGraphs",
    "memory_setting",
    "run",
]
