"""Parsing of sizes in bytes: 80GiB, 512MiB, 16 GB."""

from __future__ import annotations

import re

from autosplit.errors import PlanError

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> float:
    """Bytes. Units: B, KiB to TiB in powers of 1024, KB to TB in powers of 1000; none is bytes.

    Raises:
        PlanError: the text is no size, or nothing.
    """
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units or not _is_number(match[1]):
        raise PlanError(
            f"expected a size such as 80GiB or 512MiB, got {text!r}; known units: "
            f"{', '.join(unit for unit in _UNITS if unit)}"
        )
    return float(match[1]) * units[match[2].lower()]


def _is_number(text: str) -> bool:
    return 0.0 < float(text) < 1e30
