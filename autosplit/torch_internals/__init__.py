"""Private API of torch, by subject."""

# First of all, as it refuses a torch in which what follows would not be found.
from .version import OLDEST, TORCH

__all__ = ["OLDEST", "TORCH"]
