"""One section of a benchmark's page, and the page of such sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from .results import Results, Rows

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


def fill(template: str, parts: Mapping[str, Part[Any]], results: Results) -> str:
    """``template`` with its ``environment``, ``sections`` and ``commands``: of the parts that were
    measured, in order, each with the command of its last run."""
    known = [name for name in parts if name in results.parts]
    return template.format(
        environment=next((results.parts[name]["environment"] for name in known), ""),
        sections="".join(
            f"\n## {parts[name].title}\n\n{parts[name].about}\n\n"
            f"{parts[name].render(results.rows(name))}\n"
            for name in known
        ),
        commands="\n".join(results.parts[name]["commands"][-1] for name in known),
    )
