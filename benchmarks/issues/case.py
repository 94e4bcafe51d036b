"""One report, and what is claimed about it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

Side = Callable[[], str]
"""Run on every rank: returns what came out right, or raises, SymptomError where it is wrong."""


STAGE = "stage"
ENGINE = "engine"


class SymptomError(Exception):
    """What was reported is seen, although nothing was raised."""


@dataclasses.dataclass(frozen=True)
class Absent:
    """A side that cannot be run on CPU ranks with Gloo, and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Thread:
    """An issue or pull request on GitHub."""

    repository: str
    number: int

    @property
    def link(self) -> str:
        """In Markdown; GitHub leads from /issues/ to a pull request too."""
        short = self.repository.partition("/")[2]
        return (
            f"[{short} #{self.number}](https://github.com/{self.repository}/issues/{self.number})"
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """A reproducer of what some threads report.

    Attributes:
        name: of the row.
        threads: where it is reported.
        reported: what people see, in a sentence.
        stock: the reproducer with torch alone.
        ours: the same with autosplit.
        seen: a pattern that the failure of stock torch matches; empty where it is not to fail.
        fixed: the first version of torch that does it right; None: none of those known.
        unsolved: a pattern that autosplit's failure matches; empty where it is to be right.
        by: what of autosplit runs it: its stage under a schedule of torch, or its own engine.
        ranks: how many processes.
    """

    name: str
    threads: tuple[Thread, ...]
    reported: str
    stock: Side | Absent
    ours: Side | Absent
    seen: str = ""
    fixed: tuple[int, int] | None = None
    unsolved: str = ""
    by: str = STAGE
    ranks: int = 2

    def claims(self, side: str, version: tuple[int, ...]) -> Claim:
        """What is claimed of a side on a version of torch."""
        if side == "ours":
            return Claim(self.unsolved)
        fixed = self.fixed is not None and version >= self.fixed
        return Claim("" if fixed else self.seen)


@dataclasses.dataclass(frozen=True)
class Claim:
    """That a side is right, or fails with what a pattern matches."""

    failure: str

    def holds(self, state: str, text: str) -> bool:
        """Whether it came out so."""
        if not self.failure:
            return state == RIGHT
        return state == FAILS and re.search(self.failure, text) is not None


RIGHT = "right"
FAILS = "fails"
ABSENT = "cannot be rebuilt here"
