"""Fused against split backward, alternating within one run, on the same model and data."""

from .workload import Workload, configure

__all__ = ["Workload", "configure"]
