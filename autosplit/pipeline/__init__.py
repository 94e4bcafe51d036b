"""Schedules, and the engine that runs split stages by a schedule over several processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosplit.pipeline.builders.build import SCHEDULES, WEIGHTS, build
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.search.remedies import balance, offload, recompute
from autosplit.pipeline.search.search import search
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.pipeline.simulation.simulate import Costs, Span, Timeline, simulate
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.pipeline.validation.torch_csv import read_csv, write_csv
from autosplit.pipeline.validation.validate import validate
from autosplit.ranks.default_group import process_group
from autosplit.ranks.launch import launch

if TYPE_CHECKING:
    from autosplit.recorder.options import Recorder
    from autosplit.trainer.options import RunOptions, StageOptions
    from autosplit.trainer.trainer import PipelineTrainer

__all__ = [
    "SCHEDULES",
    "WEIGHTS",
    "Action",
    "Costs",
    "LimitError",
    "PipelineTrainer",
    "Recorder",
    "RunOptions",
    "Schedule",
    "Span",
    "StageCollectives",
    "StageMemory",
    "StageOptions",
    "Timeline",
    "Transfer",
    "balance",
    "build",
    "launch",
    "offload",
    "peak_memory",
    "process_group",
    "read_csv",
    "recompute",
    "search",
    "search_within",
    "simulate",
    "validate",
    "write_csv",
]

_OF_TRAINER = {
    "PipelineTrainer": "autosplit.trainer.trainer",
    "Recorder": "autosplit.recorder.options",
    "RunOptions": "autosplit.trainer.options",
    "StageOptions": "autosplit.trainer.options",
}


def __getattr__(name: str) -> Any:
    """Import the trainer's names at their first use, because the trainer imports from this
    folder.
    """
    if name not in _OF_TRAINER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_OF_TRAINER[name]), name)
    return value
