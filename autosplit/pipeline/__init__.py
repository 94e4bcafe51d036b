"""Schedules and the engine that drives split stages through them over several processes."""

from .costs import Costs
from .critical import critical_path
from .launch import launch
from .memory import StageMemory, peak_memory
from .schedule import Schedule
from .schedules import SCHEDULES, WEIGHTS, build
from .search import search
from .search.exact import Exact, exact
from .simulate import simulate
from .timeline import Span, Timeline
from .trainer import PipelineTrainer
from .transfer import Transfer
from .validate import validate
from .worker import process_group

__all__ = [
    "SCHEDULES",
    "WEIGHTS",
    "Costs",
    "Exact",
    "PipelineTrainer",
    "Schedule",
    "Span",
    "StageMemory",
    "Timeline",
    "Transfer",
    "build",
    "critical_path",
    "exact",
    "launch",
    "peak_memory",
    "process_group",
    "search",
    "simulate",
    "validate",
]
