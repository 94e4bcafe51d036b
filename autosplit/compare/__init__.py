"""Fused against split backward, alternating within one run, on the same model and data."""

from .factory_settings import configure
from .workload import Workload

__all__ = ["Workload", "configure"]
