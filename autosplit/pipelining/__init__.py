"""Split stages for torch.distributed.pipelining: its schedules, its runtime, our graphs."""

from .stage import SplitPipelineStage

__all__ = ["SplitPipelineStage"]
