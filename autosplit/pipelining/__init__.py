"""Split stages for torch.distributed.pipelining, whose schedules and runtime run autosplit's
graphs.
"""

from .schedule import dw_builder, reset_shapes, torch_schedule
from .stage import SplitPipelineStage

__all__ = [
    "SplitPipelineStage",
    "dw_builder",
    "reset_shapes",
    "torch_schedule",
]
