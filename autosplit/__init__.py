"""autosplit: split any ``nn.Module``'s backward into input gradients and weight gradients."""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .checkpoint import CheckpointManager, load_checkpoint, read_checkpoint, save_checkpoint
    from .dynamo.pending_weights import backward_weight
    from .mesh.costs import DeviceSpeed, Link, measure_collectives
    from .module import SplitModule
    from .passes import CollectiveCosts
    from .pipeline import (
        PipelineTrainer,
        Recorder,
        RunOptions,
        StageOptions,
        launch,
        process_group,
    )
    from .pipelining import SplitPipelineStage
    from .planner import Plan, meta_model, partition
    from .report import write_timeline
    from .runtime.options import SplitOptions
    from .splitting import split
    from .stage import Stage

__version__ = "0.1.0"

__all__ = [
    "AutosplitError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "CheckpointManager",
    "CollectiveCosts",
    "DeferralWarning",
    "DeviceSpeed",
    "Link",
    "PipelineError",
    "PipelineTrainer",
    "Plan",
    "PlanError",
    "Recorder",
    "RunOptions",
    "ScheduleError",
    "SplitError",
    "SplitModule",
    "SplitOptions",
    "SplitPipelineStage",
    "Stage",
    "StageOptions",
    "__version__",
    "backward_weight",
    "launch",
    "load_checkpoint",
    "measure_collectives",
    "meta_model",
    "partition",
    "process_group",
    "read_checkpoint",
    "save_checkpoint",
    "split",
    "write_timeline",
]

_HOMES = {
    "CheckpointManager": "autosplit.checkpoint",
    "CollectiveCosts": "autosplit.passes",
    "DeviceSpeed": "autosplit.mesh.costs",
    "Link": "autosplit.mesh.costs",
    "PipelineTrainer": "autosplit.pipeline",
    "Plan": "autosplit.planner",
    "Recorder": "autosplit.pipeline",
    "RunOptions": "autosplit.pipeline",
    "SplitModule": "autosplit.module",
    "SplitOptions": "autosplit.runtime.options",
    "SplitPipelineStage": "autosplit.pipelining",
    "Stage": "autosplit.stage",
    "StageOptions": "autosplit.pipeline",
    "backward_weight": "autosplit.dynamo.pending_weights",
    "launch": "autosplit.pipeline",
    "load_checkpoint": "autosplit.checkpoint",
    "measure_collectives": "autosplit.mesh.costs",
    "meta_model": "autosplit.planner",
    "partition": "autosplit.planner",
    "process_group": "autosplit.pipeline",
    "read_checkpoint": "autosplit.checkpoint",
    "save_checkpoint": "autosplit.checkpoint",
    "split": "autosplit.splitting",
    "write_timeline": "autosplit.report",
}

_FACES = ("passes", "pipeline", "pipelining")


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because most of them import all of torch."""
    if name in _FACES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value
