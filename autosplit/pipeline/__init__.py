"""Schedules and the engine that drives split stages through them over several processes."""

from autosplit.pipeline.builders.build import SCHEDULES, WEIGHTS, build
from autosplit.pipeline.engine.default_group import process_group
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.search.balance import balance
from autosplit.pipeline.search.offload import offload
from autosplit.pipeline.search.recompute import recompute
from autosplit.pipeline.search.search import search
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs, Span, Timeline, simulate
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.pipeline.validation.torch_csv import read_csv, write_csv
from autosplit.pipeline.validation.validate import validate

from .trainer import PipelineTrainer
from .training.options import RunOptions, StageOptions

__all__ = [
    "SCHEDULES",
    "WEIGHTS",
    "Action",
    "Costs",
    "LimitError",
    "PipelineTrainer",
    "RunOptions",
    "Schedule",
    "Span",
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
