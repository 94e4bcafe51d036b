"""Sizes in bytes as people write them, read and written: 12GiB, 800 MB, 1.50 MiB."""

from __future__ import annotations

import re

from autosplit.errors import AutosplitError, PlanError

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_MOST = 2**63 - 1


def parse_size(
    size: str | int, what: str = "a size", error: type[AutosplitError] = PlanError
) -> int:
    """Whole bytes, at least 1; a fraction of a byte is left out.

    Args:
        size: text, in B, KiB to TiB (powers of 1024), KB to TB (powers of 1000) or without a unit,
            which is bytes; or a number of bytes.
        what: it is of, for messages, as in ``"memory_limit"``.
        error: what to raise.

    Raises:
        AutosplitError: of that type: this is no size, or less than a byte.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str):
        found = _read(size)
    else:
        found = 0
    if not 1 <= found <= _MOST:
        raise error(
            f"expected {what} such as 80GiB, '800 MB' or a number of bytes, got {size!r}; known "
            f"units: {', '.join(unit for unit in _UNITS if unit)}"
        )
    return found


def size_text(count: int) -> str:
    """``1.50 MiB``; bytes below 1 KiB as they are."""
    units = ["KiB", "MiB", "GiB"]
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(units))
    return f"{count / 1024**power:.2f} {units[power - 1]}"


def _read(text: str) -> int:
    """0 for what is no size."""
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units or len(match[1]) > 30:
        return 0
    return int(float(match[1]) * units[match[2].lower()])
