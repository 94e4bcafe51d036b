"""Errors of passes and of the code they generate; autosplit turns them into a SplitError."""


class PassError(Exception):
    """A graph broke an invariant, or a pass cannot do its work on it."""


class StrideError(PassError):
    """A kernel gave a tensor other strides than tracing saw; raised by generated code."""


class SliceCountError(PassError):
    """W cannot be cut into so many slices.

    Attributes:
        most: into how many it can be.
    """

    def __init__(self, found: int, asked: int) -> None:
        self.most = max(found, 1)
        super().__init__(
            f"W has {found} matrix products and convolutions and cannot be cut into {asked} "
            f"slices; ask for 1 to {self.most}"
        )
