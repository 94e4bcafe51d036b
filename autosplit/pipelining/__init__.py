"""Split stages for torch.distributed.pipelining: its schedules, its runtime, our graphs."""

from .dw_builder import dw_builder
from .schedule import torch_schedule
from .stage import SplitPipelineStage

__all__ = ["SplitPipelineStage", "dw_builder", "torch_schedule"]
