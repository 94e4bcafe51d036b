"""Errors of passes and of the code they generate; autosplit turns them into a SplitError."""


class PassError(Exception):
    """A graph broke an invariant, or a pass cannot do its work on it."""


class StrideError(PassError):
    """A kernel gave a tensor other strides than tracing saw; raised by generated code."""


class UnknownSizeError(PassError):
    """Zeros are needed whose size is known only when the graph runs."""
