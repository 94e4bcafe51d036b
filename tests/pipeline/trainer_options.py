"""The options of a trainer by name alone."""

from __future__ import annotations

import inspect
from typing import Any

from autosplit.pipeline import RunOptions, StageOptions
from autosplit.runtime.options import OPTION_NAMES


def grouped(**options: Any) -> dict[str, Any]:
    """The keyword arguments of ``PipelineTrainer``: each option in the group that has it."""
    groups = {"stage_options": StageOptions, "run_options": RunOptions}
    for group, kind in groups.items():
        accepted = {*inspect.signature(kind).parameters}
        if kind is StageOptions:
            accepted |= OPTION_NAMES
        names = options.keys() & accepted
        if names:
            options[group] = kind(**{name: options.pop(name) for name in names})
    return options
