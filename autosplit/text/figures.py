"""Figures as people write them: sizes in bytes (12GiB, 800 MB, 1.50 MiB), names, quartiles."""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from autosplit.errors import AutosplitError, PlanError

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
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
        AutosplitError: of that type: this is no size, or less than a byte; says why.
    """
    found, wrong = _read(size) if isinstance(size, str) else _counted(size)
    if not wrong and found < 1:
        wrong = "which is less than a byte"
    if not wrong and found > _MOST:
        wrong = "which is more bytes than a machine can address"
    if wrong:
        raise error(
            f"expected {what} such as 80GiB, '800 MB' or a number of bytes, got {size!r}, {wrong}"
        )
    return found


def size_text(count: int) -> str:
    """``1.50 MiB``; bytes below 1 KiB as they are."""
    units = ["KiB", "MiB", "GiB"]
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(units))
    return f"{count / 1024**power:.2f} {units[power - 1]}"


def _counted(size: object) -> tuple[int, str]:
    """A number of bytes, or 0 and what is wrong with it."""
    if isinstance(size, bool):
        return 0, "which says neither how much nor of what"
    if isinstance(size, float):
        if not math.isfinite(size):
            return 0, "which is no number of bytes: for no limit, leave it out"
        if 0.0 < size <= 1.0:
            return 0, "which looks like a share: say of how many bytes, and multiply"
        return 0, f"which is a float: pass {int(size)}, as int(...) makes of it"
    try:
        return operator.index(size), ""  # type: ignore[arg-type]
    except TypeError:
        return 0, f"of type {type(size).__name__}, which is neither text nor a whole number"


def _read(text: str) -> tuple[int, str]:
    """The bytes that a text says, or 0 and what is wrong with it."""
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None:
        return 0, _unreadable(text)
    number, unit = match[1].replace("_", ""), match[2].lower()
    if unit not in units:
        return 0, _unknown_unit(match[1], match[2])
    if len(number) > 30:
        return 0, "which is more bytes than a machine can address"
    whole, _, fraction = number.partition(".")
    return int(f"{whole}{fraction}") * units[unit] // 10 ** len(fraction), ""


def _unreadable(text: str) -> str:
    if not text.strip():
        return "which is empty"
    if text.strip().startswith("-"):
        return "which is less than a byte"
    if text.strip().endswith("%"):
        return "which is a share: say of how many bytes, and multiply"
    plain = text.replace(",", "")
    if plain != text and _SIZE.fullmatch(plain):
        return "which has commas: leave them out, or write a point where a fraction begins"
    return f"which is not a number with a unit behind it; {_known_units()}"


def _unknown_unit(number: str, unit: str) -> str:
    letter = unit[:1].upper()
    if letter in "KMGT" and unit.lower() in (letter.lower(), f"{letter.lower()}i"):
        return f"which may mean '{number}{letter}iB' or '{number}{letter}B': say which"
    return f"whose unit is not known; {_known_units()}"


def _known_units() -> str:
    return f"known units: {', '.join(unit for unit in _UNITS if unit)}"


def few(names: Sequence[str], shown: int = 1) -> str:
    """The first names, and how many more there are; nothing where there are none."""
    first = ", ".join(names[:shown])
    return f"{first} and {len(names) - shown} more" if len(names) > shown else first


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


def ratios(mine: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Of each pair of measurements that were taken one after the other."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]
