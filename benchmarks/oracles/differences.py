"""Where cases differ: numbers by more than rounding, all else by anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, TypeAlias

Cases: TypeAlias = dict[str, Any]
"""By name, something that JSON can hold."""

_ROUNDING = 1e-9
_SHOWN = 160  # letters of a value


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each case that differs, is gone or is new."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            lines.append(f"{name}: gone")
        elif name not in before:
            lines.append(f"{name}: new")
        else:
            lines += [f"{name}: {each}" for each in _first(before[name], after[name])]
    return lines


def _first(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two values first differ, if they do."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = ((f"{where}.{key}", one.get(key), other.get(key)) for key in {**one, **other})
    elif isinstance(one, list) and isinstance(other, list):
        pairs = ((f"{where}[{n}]", *two) for n, two in enumerate(zip_longest(one, other)))
    elif isinstance(one, str) and isinstance(other, str) and "\n" in one + other:
        both = enumerate(zip_longest(one.splitlines(), other.splitlines()), 1)
        pairs = ((f"{where} line {n}", *two) for n, two in both)
    else:
        if not _equal(one, other):
            yield f"{where} {one!r:.{_SHOWN}} -> {other!r:.{_SHOWN}}"
        return
    for deeper, this, that in pairs:
        found = next(_first(this, that, deeper), None)
        if found is not None:
            yield found
            return


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(one == other)
