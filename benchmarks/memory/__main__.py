"""``python -m benchmarks.memory [PART ...]`` measures and writes README.md and results.json."""

from __future__ import annotations

import argparse
import logging
import pathlib
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from ..command import parse
from ..environment import describe
from ..paper.settings import FAMILIES, SIZES
from ..results import Results
from .page import PARTS, write
from .settings import Settings

HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each contender")
    parser.add_argument("--rounds", type=int, default=15, help="timed microbatches of a stage")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="of stand-in stages")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the solver for a case")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    options = parse(parser, PARTS)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results.read(options.output / "results.json")
    settings = Settings(
        options.size,
        tuple(options.families),
        tuple(options.microbatches),
        options.steps,
        options.rounds,
        tuple(options.ranks),
        options.seconds,
        options.output,
    )
    failed = []
    for name in options.parts or PARTS:
        words = ["python", "-m", "benchmarks.memory", name]
        for option in ("size", "families", "microbatches", "steps", "rounds", "ranks", "seconds"):
            value = getattr(options, option)
            if value != parser.get_default(option):
                many = value if isinstance(value, list) else [value]
                words += [f"--{option}", *map(str, many)]
        try:
            rows = [*_shown(name, PARTS[name].measure(settings))]
            write(results, name, rows, shlex.join(words), describe(threads=1))
            print(f"\n{PARTS[name].title}\n\n{PARTS[name].render(results.rows(name))}", flush=True)
        except Exception:  # the other parts are not to be lost
            traceback.print_exc()
            failed.append(name)
    if failed:
        sys.exit(f"these parts failed, and their rows are as they were: {', '.join(failed)}")


def _shown(part: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each row's name on the terminal as soon as it is there, with the time that it took."""
    start = time.monotonic()
    for row in rows:
        print(f"{part}: {row['name']} after {time.monotonic() - start:.0f} s", flush=True)
        yield row
    print(f"{part}: done after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
