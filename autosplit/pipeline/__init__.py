"""Schedules and the engine that drives split stages through them over several processes."""

from .launch import launch
from .schedule import Schedule
from .schedules import SCHEDULES, WEIGHTS, build
from .simulate import simulate
from .timeline import Span, Timeline
from .trainer import PipelineTrainer
from .validate import validate
from .worker import process_group

__all__ = [
    "SCHEDULES",
    "WEIGHTS",
    "PipelineTrainer",
    "Schedule",
    "Span",
    "Timeline",
    "build",
    "launch",
    "process_group",
    "simulate",
    "validate",
]
