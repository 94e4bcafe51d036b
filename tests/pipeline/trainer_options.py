"""The options of a trainer by name alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from autosplit.pipeline import RunOptions, StageOptions


def grouped(**options: Any) -> dict[str, Any]:
    """The keyword arguments of ``PipelineTrainer``: each option in the group that has it."""
    groups = {"stage_options": StageOptions, "run_options": RunOptions}
    for group, kind in groups.items():
        names = [field.name for field in fields(kind) if field.name in options]
        if names:
            options[group] = kind(**{name: options.pop(name) for name in names})
    return options
