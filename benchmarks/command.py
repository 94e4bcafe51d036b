"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence


def parse(
    parser: argparse.ArgumentParser,
    known: Iterable[str],
    kind: str = "part",
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """The options, with the names of the parts to measure as ``parts`` (or another ``kind``).

    Names that are not ``known`` end the program with a message that lists those that are.
    """
    names, plural = list(known), f"{kind}s"
    parser.add_argument(plural, nargs="*", help=f"which of {', '.join(names)}; all by default")
    options = parser.parse_args(arguments)
    unknown = sorted(set(getattr(options, plural)) - set(names))
    if unknown:
        parser.error(f"unknown {kind} {unknown[0]!r}; known {plural}: {', '.join(names)}")
    return options
