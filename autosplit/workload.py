"""Where ``Workload`` was before ``autosplit.compare`` had it; goes with the next version."""

from __future__ import annotations

from . import compare
from .text.moved_names import moved_names

__getattr__ = moved_names(
    __name__,
    {name: (f"autosplit.compare.{name}", getattr(compare, name)) for name in compare.__all__},
)
