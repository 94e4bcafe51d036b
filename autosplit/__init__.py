"""autosplit: split any ``nn.Module``'s backward into input gradients and weight gradients."""

from .errors import (
    AutosplitError,
    CaptureError,
    CheckpointError,
    PipelineError,
    PlanError,
    ScheduleError,
    SplitError,
)
from .integrations.deferral import backward_weight
from .module import SplitModule, split
from .stage import Stage

__version__ = "0.1.0"

__all__ = [
    "AutosplitError",
    "CaptureError",
    "CheckpointError",
    "PipelineError",
    "PlanError",
    "ScheduleError",
    "SplitError",
    "SplitModule",
    "Stage",
    "__version__",
    "backward_weight",
    "split",
]
