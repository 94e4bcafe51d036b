"""Schedules and the engine that drives split stages through them over several processes."""

from .processes.launch import launch
from .processes.worker import process_group
from .schedule import Schedule
from .schedules import SCHEDULES, WEIGHTS, build
from .search import search
from .search.exact import Exact, exact
from .simulation.costs import Costs
from .simulation.critical import critical_path
from .simulation.memory import StageMemory, peak_memory
from .simulation.simulate import simulate
from .simulation.transfer import Transfer
from .timeline import Span, Timeline
from .training.trainer import PipelineTrainer
from .validate import validate

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
