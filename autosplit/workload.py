"""Where ``Workload`` was before ``autosplit.compare`` had it; goes with the next version."""

from __future__ import annotations

from autosplit.text.moved_names import moved_names

from . import compare

__getattr__ = moved_names(
    __name__,
    {name: (f"autosplit.compare.{name}", getattr(compare, name)) for name in compare.__all__},
)
