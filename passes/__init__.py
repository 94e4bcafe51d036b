"""Graph passes that split a joint graph into forward, backward_input and backward_weight.

The package imports torch, and no other part of autosplit.
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
