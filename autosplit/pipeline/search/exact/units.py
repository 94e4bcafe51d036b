"""Numbers as integers, for a solver that knows no others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

_DIGITS = 12  # of a number; further ones are what sums of floating point leave


class Units:
    """A grid on which numbers are integers.

    Numbers that are short decimals, such as bytes or rounded milliseconds, are on it exactly;
    others are rounded to a fraction of the largest of them.

    Args:
        numbers: finite and >= 0; what is to lie on the grid.
        finest: units that the largest number may have.
    """

    def __init__(self, numbers: Iterable[float], finest: int = 1_000_000) -> None:
        fractions = {_fraction(number) for number in numbers if number}
        per_unit = Fraction(math.lcm(*(each.denominator for each in fractions)))
        wholes = [int(each * per_unit) for each in fractions]
        shared = math.gcd(*wholes) or 1
        self.exact = max(wholes, default=0) // shared <= finest
        largest = max(fractions, default=Fraction(1))
        self._per_unit = per_unit / shared if self.exact else finest / largest

    def nearest(self, number: float) -> int:
        """``number`` in units."""
        return round(_fraction(number) * self._per_unit)

    def above(self, number: float) -> int:
        """``number`` in units, rounded up."""
        return math.ceil(_fraction(number) * self._per_unit)

    def below(self, number: float) -> int:
        """``number`` in units, rounded down."""
        return math.floor(_fraction(number) * self._per_unit)

    def value(self, units: float) -> float:
        """What so many units are."""
        return float(Fraction(units) / self._per_unit)

    def slack(self, terms: Sequence[object]) -> float:
        """How far a sum of so many numbers can be from the sum of their units."""
        return 0.0 if self.exact else 0.5 * self.value(len(terms))


def _fraction(number: float) -> Fraction:
    return Fraction(f"{number:.{_DIGITS}g}")
