"""The error a pass raises; autosplit turns it into a SplitError for its users."""


class PassError(Exception):
    """A graph broke an invariant, or a pass cannot do its work on it."""


class BudgetError(PassError):
    """A memory budget that no division of the graph meets."""
