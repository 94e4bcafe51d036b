"""A model in the mode, training or evaluation, in which it was not captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from autosplit.errors import AutosplitError, PlanError
from autosplit.torch_internals.module_state import modes_kept

from .bare_copy import NotCopiedError, bare_copy
from .operation_sequence import OperationSequence

Capture = Callable[[nn.Module], OperationSequence]
_Later = Callable[[], OperationSequence]


class OtherMode:
    """A model in its other mode, captured when that is asked for: a run that never evaluates does
    not pay for it. Until then this holds a copy of the model as it is now, without parameters.

    A model that cannot be copied so is captured at once.

    Args:
        model: as it shall be but for its mode.
        training: whether that mode is training.
        capture: traces a model.

    Attributes:
        training: whether that mode is training.
    """

    def __init__(self, model: nn.Module, training: bool, capture: Capture) -> None:
        self.training = training
        self._outcome: _Later | OperationSequence | AutosplitError
        try:
            self._outcome = partial(_of_copy, bare_copy(model), training, capture)
        except NotCopiedError:
            self._outcome = _outcome(partial(_in_mode, model, training, capture))

    def line(self) -> OperationSequence:
        """Its operations.

        Raises:
            CaptureError: in that mode it cannot be captured.
            PlanError: it can be, but no later than in the other mode.
        """
        outcome = self._outcome
        if not isinstance(outcome, OperationSequence | AutosplitError):
            outcome = self._outcome = _outcome(outcome)
        if isinstance(outcome, AutosplitError):
            raise outcome
        return outcome


def _outcome(make: _Later) -> OperationSequence | AutosplitError:
    try:
        return make()
    except AutosplitError as error:
        return error


def _in_mode(model: nn.Module, training: bool, capture: Capture) -> OperationSequence:
    with modes_kept([model]):
        if model.training is not training:
            model.train(training)
        return capture(model)


def _of_copy(copied: nn.Module, training: bool, capture: Capture) -> OperationSequence:
    """The operations of a copy, whatever surrounds the call that asked for them.

    Raises:
        CaptureError: it cannot be captured.
        PlanError: it reads parameters that are not its own: those of what it is a copy of.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in _devices():
            stack.enter_context(torch.autocast(device, enabled=False))
        line = _in_mode(copied, training, capture)
    if any(isinstance(tensor, nn.Parameter) for tensor in line.forward.constants.values()):
        raise PlanError(
            f"in that mode {type(copied).__name__} reads parameters that are not registered in it; "
            "build the stages of a model that is in that mode"
        )
    return line


def _devices() -> Iterator[str]:
    yield "cpu"
    if accelerator := torch.accelerator.current_accelerator():
        yield accelerator.type
