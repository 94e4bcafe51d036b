"""Every error that autosplit raises on purpose, and the warning that splitting gains little.

A message says what was expected, what came, and what to do. It names the user's source line if a
graph knows it. Each class names the page of the docs that explains it; tracebacks end with that
name.
"""

from __future__ import annotations

import warnings
from typing import ClassVar

_ENOUGH = 0.5


def with_code(message: str, *, wrong: str, right: str) -> str:
    """Return an error's message, followed by the code that raises it and the code to write instead.

    Args:
        message: what is wrong, and what to do.
        wrong: the code that raises the error, one or more lines.
        right: the same code, corrected.
    """
    code = (("wrong:", wrong), ("right:", right))
    lines = [
        f"  {label if number == 0 else '':6}  {line}"
        for label, text in code
        for number, line in enumerate(text.splitlines())
    ]
    return "\n".join([message, *lines])


class AutosplitError(Exception):
    """Base of every error raised by autosplit.

    Attributes:
        page: path of the docs' page about errors of this class, with the section after ``#``.
    """

    page: ClassVar[str] = "docs/index.md"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"More: {self.page}")


class CaptureError(AutosplitError):
    """A module could not be traced into one joint forward/backward graph.

    Attributes:
        because: the reason and what to do, in one line, for callers that continue without a graph.
    """

    page = "docs/limitations.md#models"

    def __init__(self, message: str = "", *, because: str = "") -> None:
        super().__init__(message)
        self.because = because or message


class FailingCallError(CaptureError):
    """The forward itself fails for these inputs, whether traced or not: a shape does not fit, for
    example.
    """


class RecursiveCallError(FailingCallError):
    """A model's forward calls the split module that was made from the same model."""


class FirstCallError(CaptureError):
    """The first call has effects that happen only once. It must run untraced; the next call is
    traced.
    """


class PythonStateError(CaptureError):
    """The forward changes Python state, constructs an object such as a module, or takes a lock. A
    graph cannot record any of these. If only the first call does so, run the module once before
    splitting.
    """


def reworded(error: AutosplitError, text: str) -> AutosplitError:
    """The same error with another text."""
    if isinstance(error, CaptureError):
        return type(error)(text, because=error.because)
    return type(error)(text)


class SplitError(AutosplitError):
    """A graph could not be split, or a split module was driven in a wrong order."""

    page = "docs/limitations.md#loops-that-deferral-affects"


class CheckError(SplitError):
    """A check of ``AUTOSPLIT_CHECK=1`` found a gradient, a write or a hook that differs from plain
    autograd.
    """

    page = "docs/debugging.md"


class ShardedError(SplitError):
    """A model is sharded by FSDP although whole parameters are needed, or in an unsupported way; or
    its parameters are DTensors that cannot be trained.
    """

    page = "docs/sharded.md"


class BackendError(SplitError):
    """A backend cannot compile a graph, or does not support this machine."""


class DeferralWarning(UserWarning):
    """Deferral does something that a user may not expect. Less than half of the weight gradients
    can be deferred to ``backward_weight()``; or a custom backward adds into a sum of its own, which
    is complete only after ``backward_weight()``; or a stage runs as several graphs.
    """

    @classmethod
    def issue(cls, name: str, share: float, because: str) -> bool:
        """Warn if less than half of a module's weight gradients can be deferred.

        Args:
            name: the name of the module.
            share: the share of the module's weight gradients that can be deferred, from 0 to 1.
            because: the reason why the other weight gradients cannot be deferred.

        Returns:
            Whether a warning was given.
        """
        if share >= _ENOUGH:
            return False
        text = f"{name}: {share:.0%} of the weight gradients wait for backward_weight(), because "
        because = because.rstrip().removesuffix(".")
        warnings.warn(f"{text}{because}. Results are right; report() says more", cls, stacklevel=3)
        return True


class AnomalyError(SplitError, RuntimeError):
    """A gradient has a NaN under ``torch.autograd.detect_anomaly()``. As in torch, it is a
    RuntimeError.
    """

    page = "docs/debugging.md"


class ScheduleError(AutosplitError):
    """A pipeline schedule is unknown, malformed or illegal."""

    page = "docs/schedules.md"


class DeadlockError(ScheduleError):
    """A pipeline schedule whose ranks wait for each other in a cycle."""

    page = "docs/nccl.md"


class PipelineError(AutosplitError):
    """A pipeline run failed: wrong input, a failed rank, a lost peer, a timeout."""

    page = "docs/pipelines.md"


class BatchError(PipelineError):
    """A rank refuses a batch, so no rank has run any part of it. The trainer accepts the next
    batch.
    """


class AuditError(PipelineError):
    """An action gave other bits when a rank ran it a second time."""


class FactoryError(PipelineError):
    """A command's factory does not exist, or does not return a model with example inputs."""

    page = "docs/command-line.md"


class PlanError(AutosplitError):
    """A model cannot be cut, measured or planned as requested."""

    page = "docs/planner.md"


class CheckpointError(AutosplitError):
    """A checkpoint cannot be read, or does not fit the model."""

    page = "docs/checkpoints.md"


class ReplayError(AutosplitError):
    """A bundle of the flight recorder cannot be read, or an action of it cannot be run again."""

    page = "docs/flight-recorder.md"


class OutputError(AutosplitError):
    """An output file or folder cannot be written."""
