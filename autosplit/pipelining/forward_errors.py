"""Errors of a stage's forward as the user meets them: the forward's own, and those of its graph."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from autosplit.capture.diagnosis import is_raised_by_forward
from autosplit.capture.effects.module_hooks import is_torch_file
from autosplit.capture.effects.side_effects import error_of_call
from autosplit.errors import CaptureError, FailingCallError, PipelineError

from .arguments import refuse_unfit_call
from .results import described


def refused_capture(
    owner: str,
    stage_index: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    error: CaptureError,
) -> Exception:
    """What to raise where a stage's module cannot be captured.

    Args:
        owner: the stage.
        stage_index: its place.
        module: its.
        args: positional inputs.
        kwargs: keyword inputs.
        leaves: all of them.
        error: that of the capture.

    Raises:
        PipelineError: there are others than the forward takes.

    Returns:
        The forward's own exception where it raises one; a PipelineError where an operator refuses
        its inputs; a CaptureError where they do not make one graph.
    """
    refuse_unfit_call(owner, module, args, kwargs, first=stage_index == 0)
    failing = isinstance(error, FailingCallError)
    own = error_of_call(module, args, kwargs) if failing or is_raised_by_forward(error) else None
    if own is not None and not failing:
        own.add_note(f"raised by the forward of {owner}, as its graph was captured")
        return own
    made: Exception
    if failing:
        why = str(error) if own is None else f"{type(own).__name__}: {own} {line_of(own)}".rstrip()
        tensors = described([each.detach() for each in leaves if isinstance(each, Tensor)])
        tensors = tensors.replace(" without gradient", "")
        source, advice = (
            f"stage {stage_index - 1} hands on",
            "Let the one return what the other takes",
        )
        if not stage_index:
            source, advice = "step() was given", "Give it what the module's forward takes"
        made = PipelineError(
            f"{owner} cannot be called with what {source}, {tensors or 'no tensor'}"
            f"{', keyword arguments last' if kwargs else ''}: {why.rstrip('.')}. {advice}"
        )
    else:
        made = CaptureError(
            f"{owner} must be one graph: {error}\nOr keep torch's PipelineStage "
            "around module = autosplit.split(submodule), which may have graph breaks, with "
            "dw_builder=autosplit.pipelining.dw_builder(module)",
            because=error.because,
        )
    made.__cause__ = error if own is None else own
    return made


def failed_call(what: str, error: Exception) -> Exception:
    """What to raise where a graph's call raises: a kernel's error as a PipelineError that says
    whose it is, any other as it is, with that as a note.
    """
    if type(error) is RuntimeError:
        made = PipelineError(f"{what} failed: {error}")
        made.__cause__ = error
        return made
    error.add_note(f"in {what}")
    return error


def line_of(error: BaseException) -> str:
    """``(at file:line)`` of the innermost frame that is the user's, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_ours(frame.filename)]
    return f"(at {own[-1].filename}:{own[-1].lineno})" if own else ""


def _is_ours(file: str) -> bool:
    root = __file__.rpartition("pipelining")[0]
    return file.startswith((root, "<")) or is_torch_file(file)
