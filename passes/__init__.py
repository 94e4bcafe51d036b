"""Graph passes: joint forward/backward graph -> forward | backward_input | backward_weight.

Imports torch and nothing of autosplit.
"""

from .errors import PassError
from .graph import Kind, Role, SplitGraphs
from .manager import GRAPH_PASSES, PASSES, GraphPass, Pass, run
from .memory_policy import MEMORY, CollectiveCosts, Memory, memory_setting

__all__ = [
    "GRAPH_PASSES",
    "MEMORY",
    "PASSES",
    "CollectiveCosts",
    "GraphPass",
    "Kind",
    "Memory",
    "Pass",
    "PassError",
    "Role",
    "SplitGraphs",
    "memory_setting",
    "run",
]
