"""One section of a benchmark's page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from .results import Rows

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Part(Generic[S]):
    """One section, measured under settings of type ``S``.

    Attributes:
        title: its heading.
        about: what was done.
        measure: gives rows, each with a ``name`` of its own.
        render: rows -> table and verdicts.
    """

    title: str
    about: str
    measure: Callable[[S], Iterable[dict[str, Any]]]
    render: Callable[[Rows], str]
