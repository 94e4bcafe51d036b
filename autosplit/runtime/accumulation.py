"""``Accumulation``: how weight gradients of microbatches are added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosplit.errors import SplitError

FEW_ROWS = 128
"""Products and convolutions of at most this many rows a microbatch gain by being joined. With more
rows, joined products gain little over fused ones, and take more memory; see
benchmarks/accumulation.
"""

MOST_JOINED = 16
"""The most microbatches whose W is one call: longer runs gain no more, and need larger graphs."""


@dataclass(frozen=True)
class Accumulation:
    """How W and B add the weight gradients of microbatches.

    Attributes:
        fuses: whether a matrix product adds into the sum directly, instead of being computed and
            then added.
        joined_rows: a product or convolution with at most this many rows per microbatch runs once
            for all microbatches whose Ws follow each other directly.
    """

    fuses: bool = False
    joined_rows: int = 0

    @classmethod
    def named(cls, setting: str | int) -> Accumulation:
        """The accumulation for a setting, which is a name or a number of rows; see
        ``accumulation=`` of ``autosplit.split``.

        Raises:
            SplitError: an unknown name or a negative number; lists the known names.
        """
        if type(setting) is int and setting >= 0:
            return cls(fuses=True, joined_rows=setting)
        if isinstance(setting, str) and setting in ACCUMULATION:
            return ACCUMULATION[setting]
        names = ", ".join(map(repr, ACCUMULATION))
        raise SplitError(
            f"unknown accumulation {setting!r}; expected one of {names}, or a number of rows: "
            "products with at most that many rows a microbatch are joined"
        )


ACCUMULATION: Mapping[str, Accumulation] = {
    "exact": Accumulation(),
    "fused": Accumulation(fuses=True),
    "joined": Accumulation(joined_rows=FEW_ROWS),
    "auto": Accumulation(fuses=True, joined_rows=FEW_ROWS),
}
