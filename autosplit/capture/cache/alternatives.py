"""Graphs that one key stands for: those of open sizes, told apart by what was assumed of sizes."""

from __future__ import annotations

import hashlib
import pickle
from typing import NamedTuple

from .plain_data import read_plain
from .size_symbols import Assumptions

_MOST = 8
"""How many graphs one key has at most; those kept last stay."""


class Alternative(NamedTuple):
    """One of them.

    Attributes:
        assumptions: where they hold, the graphs are valid.
        key: of the graphs.
    """

    assumptions: Assumptions
    key: str

    @classmethod
    def of(cls, key: str, assumptions: Assumptions) -> Alternative:
        """The one under a common key with these assumptions."""
        digest = hashlib.sha256(f"{key}\n{assumptions!r}".encode())
        return cls(assumptions, digest.hexdigest())


def read_alternatives(data: bytes | None) -> list[Alternative]:
    """All of a file; none where it is no such file."""
    if data is None:
        return []
    try:
        return [Alternative(Assumptions(*fields), key) for fields, key in read_plain(data)]
    except Exception:  # damaged, or of somebody else
        return []


def with_alternative(data: bytes | None, found: Alternative) -> bytes:
    """A file's content with one more, which is looked at first.

    Args:
        data: what the file holds; None where there is none.
        found: the one.
    """
    others = [each for each in read_alternatives(data) if each != found]
    kept = (found, *others)[:_MOST]
    return pickle.dumps([(tuple(each.assumptions), each.key) for each in kept])
