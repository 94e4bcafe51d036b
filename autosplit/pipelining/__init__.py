"""Split stages for torch.distributed.pipelining: its schedules, its runtime, our graphs."""

from .dw_builder import dw_builder
from .graph_pp import SplitGraphProvider, SplitStageGraphs
from .schedule import torch_schedule
from .stage import SplitPipelineStage

__all__ = [
    "SplitGraphProvider",
    "SplitPipelineStage",
    "SplitStageGraphs",
    "dw_builder",
    "torch_schedule",
]
