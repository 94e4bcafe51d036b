"""Every error autosplit raises on purpose.

A message says what was expected, what came, and what to do; where a graph knows
the user's source line, the message names it.
"""


class AutosplitError(Exception):
    """Base of every error raised by autosplit."""


class CaptureError(AutosplitError):
    """A module could not be traced into one joint forward/backward graph."""


class FailingCallError(CaptureError):
    """The forward fails for these inputs, traced or not: a shape that does not fit, for example."""


class FirstCallError(CaptureError):
    """A first call is to be run as it is, for what it does once; the next can be traced."""


class SplitError(AutosplitError):
    """A graph could not be split, or a split module was driven in a wrong order."""


class ShardedError(SplitError):
    """A model is sharded in a way that takes weight gradients in ``backward()``: FSDP."""


class BackendError(SplitError):
    """A backend cannot compile a graph, or not for this machine."""


class ScheduleError(AutosplitError):
    """A pipeline schedule is unknown, malformed or illegal."""


class PipelineError(AutosplitError):
    """A pipeline run failed: wrong input, a failed rank, a lost peer, a timeout."""


class PlanError(AutosplitError):
    """A model cannot be cut, costed or planned as asked."""


class CheckpointError(AutosplitError):
    """A checkpoint cannot be read, or does not fit the model."""


class OutputError(AutosplitError):
    """A file or folder that was asked for cannot be written."""
