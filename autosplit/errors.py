"""Every error autosplit raises on purpose, and the warning that splitting gains little.

A message says what was expected, what came, and what to do; where a graph knows
the user's source line, the message names it.
"""

from __future__ import annotations

import warnings

_ENOUGH = 0.5


class AutosplitError(Exception):
    """Base of every error raised by autosplit."""


class CaptureError(AutosplitError):
    """A module could not be traced into one joint forward/backward graph.

    Attributes:
        because: why, and what to do, in a line, for those who go on without that graph.
    """

    def __init__(self, message: str = "", *, because: str = "") -> None:
        super().__init__(message)
        self.because = because or message


class FailingCallError(CaptureError):
    """The forward fails for these inputs, traced or not: a shape that does not fit, for example."""


class RecursiveCallError(FailingCallError):
    """The forward calls the split module that is made of it."""


class FirstCallError(CaptureError):
    """A first call is to be run as it is, for what it does once; the next can be traced."""


class PythonStateError(CaptureError):
    """The forward changes Python state, constructs an object, such as a module, or takes a lock, to
    do either, which no graph holds: often its first call alone does.
    """


class SplitError(AutosplitError):
    """A graph could not be split, or a split module was driven in a wrong order."""


class CheckError(SplitError):
    """``AUTOSPLIT_CHECK=1`` found a gradient, a write or a hook unlike plain autograd's."""


class ShardedError(SplitError):
    """A model is sharded (FSDP) where whole parameters are needed, or in a way that cannot be taken
    apart; or its parameters are DTensors that cannot be trained.
    """


class BackendError(SplitError):
    """A backend cannot compile a graph, or not for this machine."""


class DeferralWarning(UserWarning):
    """Less than half of a module's weight gradients can wait for ``backward_weight()``."""

    @classmethod
    def issue(cls, name: str, share: float, because: str) -> bool:
        """Warn if there is reason to.

        Args:
            name: of the module.
            share: of its weight gradients that can wait.
            because: why others cannot.

        Returns:
            Whether there was.
        """
        if share >= _ENOUGH:
            return False
        text = f"{name}: {share:.0%} of the weight gradients wait for backward_weight(), because "
        because = because.rstrip().removesuffix(".")
        warnings.warn(f"{text}{because}. Results are right; report() says more", cls, stacklevel=3)
        return True


class AnomalyError(SplitError, RuntimeError):
    """A gradient has a NaN under ``torch.autograd.detect_anomaly()``; a RuntimeError, too."""


class ScheduleError(AutosplitError):
    """A pipeline schedule is unknown, malformed or illegal."""


class DeadlockError(ScheduleError):
    """A pipeline schedule whose ranks wait for each other in a circle."""


class PipelineError(AutosplitError):
    """A pipeline run failed: wrong input, a failed rank, a lost peer, a timeout."""


class BatchError(PipelineError):
    """No rank ran anything of a batch, as one refuses it; the trainer takes the next."""


class FactoryError(PipelineError):
    """A function that a command names is not there, or returns no model with example inputs."""


class PlanError(AutosplitError):
    """A model cannot be cut, costed or planned as asked."""


class CheckpointError(AutosplitError):
    """A checkpoint cannot be read, or does not fit the model."""


class OutputError(AutosplitError):
    """A file or folder that was asked for cannot be written."""
