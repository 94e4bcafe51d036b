"""autosplit: split any ``nn.Module``'s backward into input gradients and weight gradients."""

from typing import TYPE_CHECKING, Any

from autosplit.dynamo.pending_weights import backward_weight
from autosplit.mesh.costs import CollectiveCosts, DeviceSpeed, Link, measure_collectives

from .errors import (
    AutosplitError,
    BatchError,
    CaptureError,
    CheckpointError,
    DeferralWarning,
    PipelineError,
    PlanError,
    ScheduleError,
    SplitError,
)
from .module import SplitModule
from .splitting import split
from .stage import Stage

if TYPE_CHECKING:
    from .planner import partition

__version__ = "0.1.0"

__all__ = [
    "AutosplitError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "CollectiveCosts",
    "DeferralWarning",
    "DeviceSpeed",
    "Link",
    "PipelineError",
    "PlanError",
    "ScheduleError",
    "SplitError",
    "SplitModule",
    "Stage",
    "__version__",
    "backward_weight",
    "measure_collectives",
    "partition",
    "split",
]


def __getattr__(name: str) -> Any:
    """The planner needs the pipeline, which not everybody needs; so it is imported when asked."""
    if name == "partition":
        from .planner import partition

        return partition
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
