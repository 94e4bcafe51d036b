"""autosplit: split any ``nn.Module``'s backward into input gradients and weight gradients."""

import importlib
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
    from .planner import Plan, meta_model, partition
    from .report.pictures import draw_memory

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
    "Plan",
    "PlanError",
    "ScheduleError",
    "SplitError",
    "SplitModule",
    "Stage",
    "__version__",
    "backward_weight",
    "draw_memory",
    "measure_collectives",
    "meta_model",
    "partition",
    "split",
]


_LATE = {
    "Plan": "autosplit.planner",
    "draw_memory": "autosplit.report.pictures",
    "meta_model": "autosplit.planner",
    "partition": "autosplit.planner",
}


def __getattr__(name: str) -> Any:
    """The planner needs the pipeline, which not everybody needs; so it is imported when asked."""
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
