"""Figures as people write them: sizes (12GiB, 1.50 MiB), milliseconds, lists of names,
quartiles.
"""

from __future__ import annotations

import difflib
import operator
import os
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
    subject: str = "a size",
    error: type[AutosplitError] = PlanError,
) -> int:
    """The number of bytes that a size means, at least 1. A fraction of a byte is dropped.

    Args:
        size: a number of bytes, of any integer type; or text, such as ``"12GiB"``. Units are B, KiB
            to TiB (powers of 1024) and KB to TB (powers of 1000), in capitals or not. Text without
            a unit is bytes.
        subject: the name of the size for error texts, such as ``"memory_limit"``.
        error: the type of error to raise.

    Raises:
        AutosplitError: of the type ``error``: ``size`` is not a size, is less than a byte, or is
            more than a machine can address.
    """
    count = _read(size.lower()) if isinstance(size, str) else _counted(size)
    if not 1 <= count <= _MOST:
        raise error(
            f"expected {subject} such as 80GiB, '800 MB' or a whole number of bytes (units: B, KiB "
            f"to TiB, KB to TB), got {size!r}"
        )
    return count


def size_text(count: int) -> str:
    """A number of bytes as text, such as ``1.50 MiB``; below 1 KiB in whole bytes."""
    units = ["KiB", "MiB", "GiB"]
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(units))
    return f"{count / 1024**power:.2f} {units[power - 1]}"


def _counted(size: object) -> int:
    """The number of bytes if ``size`` is a number; 0 if it is not."""
    try:
        return 0 if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        return 0


def _read(text: str) -> int:
    """The number of bytes that a text names; 0 if the text is not a size."""
    match = _SIZE.fullmatch(text)
    if match is None or match[3] not in _UNITS or len(match[1]) > 30:
        return 0
    fraction = match[2] or ""
    whole = int(match[1] + fraction) * _UNITS[match[3]]
    return whole // int("1" + "0" * len(fraction))


def few(names: Sequence[str], shown: int = 1) -> str:
    """The first names and the number of the remaining names, as text; empty for no names."""
    first = ", ".join(names[:shown])
    return f"{first} and {len(names) - shown} more" if len(names) > shown else first


def nearest(name: str, candidates: Iterable[str]) -> str:
    """A question for error texts that suggests the most similar candidate, or the few that start
    with ``name``; empty if no candidate is similar.
    """
    names = [*candidates]
    begun = [candidate for candidate in names if name and candidate.startswith(name)]
    close = begun if 0 < len(begun) < 3 else difflib.get_close_matches(name, names, 1, 0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def milliseconds(seconds: float) -> str:
    """Milliseconds as text: one decimal from 10 ms on, else three significant digits."""
    value = 1e3 * seconds
    return f"{value:,.1f}" if value >= 10.0 or value == 0.0 else f"{value:.3g}"


def short_source(line: str) -> str:
    """``file.py:12 code`` without the folder, shortened to 60 characters."""
    path, _, code = line.partition(" ")
    text = f"{os.path.basename(path)} {code}".strip()
    return text if len(text) <= 60 else text[:57] + "..."


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile, within the range of the values."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for fewer than two values."""
    if not values:
        return 0.0
    low, _, high = quartiles(values)
    return high - low
