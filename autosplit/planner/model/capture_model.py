"""Captures a model's forward as a sequence of operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autosplit.backends.garbage_collection import collecting_new_objects_only
from autosplit.capture.first_call import is_passing, warm_up
from autosplit.capture.forward_graph import CapturedForward, capture_forward
from autosplit.capture.module_paths import name_modules
from autosplit.errors import CaptureError, PlanError
from autosplit.planner.meta_init.meta_model import named_tensors, stand_in_tensors

from .operation_sequence import OperationSequence


def capture_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> OperationSequence:
    """The operations of ``model(*args, **kwargs)`` as it is now, training or not.

    Args:
        model: its parameters may be on the meta device.
        args: example positional inputs, no tensor twice among them and ``kwargs``.
        kwargs: example keyword inputs.
        device: stands for the meta device.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it computes nothing.
    """
    has_values = not any(tensor.is_meta for tensor in named_tensors(model).values())
    try:
        with stand_in_tensors(model, device), collecting_new_objects_only():
            forward = _captured(model, args, kwargs, has_values=has_values)
    except CaptureError as error:
        raise CaptureError(
            f"{error}\nOnly a model that is captured whole can be cut, also with cut_at. "
            "Change that line, or cut by hand: give the trainer a list of stages, each a module"
        ) from error
    name_modules(forward.module, model)
    line = OperationSequence(forward)
    if not line.body:
        raise PlanError(f"{type(model).__name__} computes nothing that could be a stage")
    return line


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_values: bool
) -> CapturedForward:
    """The forward; behind the first call where that is another. Without values there is none."""
    try:
        return capture_forward(model, args, kwargs)
    except CaptureError as error:
        passing = has_values and is_passing(
            error, model, args, kwargs, capture_forward, insist=True
        )
        if not passing:
            raise
    warm_up(model, args, kwargs)
    return capture_forward(model, args, kwargs)
