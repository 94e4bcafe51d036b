"""Errors of passes and of the code they generate; autosplit turns them into a SplitError."""


class PassError(Exception):
    """A graph broke an invariant, or a pass cannot do its work on it."""


class InfiniteCutError(PassError):
    """Every cut of a network is infinite: a path from source to sink has only edges without a
    price.

    Attributes:
        path: the nodes of the shortest such path, from the source to the sink.
    """

    def __init__(self, path: list[int]) -> None:
        super().__init__(f"no cut: the path {path} has no edge that may be cut")
        self.path = path


class StrideError(PassError):
    """A kernel gave a tensor other strides than tracing saw; raised by generated code."""


class UnknownSizeError(PassError):
    """A graph needs zeros for a missing gradient, but their size is known only at run time."""
