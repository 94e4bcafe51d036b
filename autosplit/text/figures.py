"""Figures as people write them: sizes in bytes (12GiB, 800 MB, 1.50 MiB), names, quartiles."""

from __future__ import annotations

import difflib
import operator
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from autosplit.errors import AutosplitError, PlanError

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:_[0-9]+)*)(?:\.([0-9]{1,30}))?\s*([a-z]*)\s*", re.ASCII)
_MOST = 2**63 - 1


def parse_size(
    size: str | SupportsIndex,
    what: str = "a size",
    error: type[AutosplitError] = PlanError,
) -> int:
    """Whole bytes, at least 1; a fraction of a byte is left out.

    Args:
        size: text, in B, KiB to TiB (powers of 1024), KB to TB (powers of 1000), in capitals or
            not, or without a unit, which is bytes; or a number of bytes, of any whole type.
        what: it is of, for messages, as in ``"memory_limit"``.
        error: what to raise.

    Raises:
        AutosplitError: of that type: this is no size, less than a byte, or more than a machine can
            address.
    """
    found = _read(size.lower()) if isinstance(size, str) else _counted(size)
    if not 1 <= found <= _MOST:
        raise error(
            f"expected {what} such as 80GiB, '800 MB' or a whole number of bytes (units: B, KiB to "
            f"TiB, KB to TB), got {size!r}"
        )
    return found


def size_text(count: int) -> str:
    """``1.50 MiB``; bytes below 1 KiB as they are."""
    units = ["KiB", "MiB", "GiB"]
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(units))
    return f"{count / 1024**power:.2f} {units[power - 1]}"


def _counted(size: object) -> int:
    """A number of bytes, or 0 where it is none."""
    try:
        return 0 if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        return 0


def _read(text: str) -> int:
    """The bytes that a text says, or 0 where it says none."""
    match = _SIZE.fullmatch(text)
    if match is None or match[3] not in _UNITS or len(match[1]) > 30:
        return 0
    fraction = match[2] or ""
    whole = int(match[1] + fraction) * _UNITS[match[3]]
    return whole // int("1" + "0" * len(fraction))


def few(names: Sequence[str], shown: int = 1) -> str:
    """The first names, and how many more there are; nothing where there are none."""
    first = ", ".join(names[:shown])
    return f"{first} and {len(names) - shown} more" if len(names) > shown else first


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names what is known by the name most like one, or by those few that begin
    so; nothing where none is.
    """
    names = [*known]
    begun = [each for each in names if name and each.startswith(name)]
    close = begun if 0 < len(begun) < 3 else difflib.get_close_matches(name, names, 1, 0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile, none of which is beyond the values."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for a single value, or none."""
    if not values:
        return 0.0
    low, _, high = quartiles(values)
    return high - low
