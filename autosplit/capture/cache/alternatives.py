"""Graphs that one key stands for: those of open sizes, told apart by what was assumed of sizes.

Under the key itself are the assumptions; under a key that each of these makes are the graphs.
"""

from __future__ import annotations

import hashlib
import pickle

from .plain_data import read_plain
from .size_symbols import Assumptions

_MOST = 8
"""How many graphs one key has at most; those kept last stay."""


def key_under(key: str, assumptions: Assumptions) -> str:
    """Key of the graphs with these assumptions, among those of a key."""
    return hashlib.sha256(f"{key}\n{assumptions!r}".encode()).hexdigest()


def read_assumptions(data: bytes | None) -> list[Assumptions]:
    """All of a file; none where it is no such file."""
    if data is None:
        return []
    try:
        return [Assumptions(*fields) for fields in read_plain(data)]
    except Exception:  # damaged, or of somebody else
        return []


def with_assumptions(data: bytes | None, made: Assumptions) -> bytes:
    """A file's content with further assumptions, which are looked at first.

    Args:
        data: what the file holds; None where there is none.
        made: the assumptions.
    """
    others = [each for each in read_assumptions(data) if each != made]
    return pickle.dumps([tuple(each) for each in (made, *others)[:_MOST]])
