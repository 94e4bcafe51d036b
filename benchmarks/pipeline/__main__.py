"""``python -m benchmarks.pipeline`` measures and writes ``benchmarks/pipeline/README.md``."""

from __future__ import annotations

import argparse
import functools
import pathlib
import shlex

from ..command import parse
from ..environment import describe
from ..results import Results
from .page import PARTS, Settings, write
from .peers import BACKENDS, COUNTS
from .standin import UNITS

HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each contender")
    parser.add_argument("--rounds", type=int, default=14, help="rounds of the overhead table")
    parser.add_argument("--soak", type=int, default=2000, help="steps of the soak")
    for option, kind, known, whose in (
        ("backends", str, BACKENDS, "peers"),
        ("microbatches", int, COUNTS, "peers"),
        ("ranks", int, tuple(UNITS), "stand-ins"),
    ):
        parser.add_argument(
            f"--{option}",
            nargs="+",
            type=kind,
            default=known,
            choices=known,
            help=f"of the {whose}' table",
        )
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    options = parse(parser, PARTS)
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results.read(options.output / "results.json")
    for name in options.parts or PARTS:
        words = ["python", "-m", "benchmarks.pipeline", name]
        for option in ("steps", "rounds", "soak"):
            words += [f"--{option}", str(getattr(options, option))]
        for option in ("backends", "microbatches", "ranks"):
            if getattr(options, option) != parser.get_default(option):
                words += [f"--{option}", *map(str, getattr(options, option))]
        deliver = functools.partial(
            write, results, name, command=shlex.join(words), environment=describe(threads=1)
        )
        settings = Settings(
            options.steps,
            options.rounds,
            options.soak,
            tuple(options.backends),
            tuple(options.microbatches),
            tuple(options.ranks),
            options.output,
            deliver,
        )
        deliver([*PARTS[name].measure(settings)])
        print(f"\n{PARTS[name].title}\n\n{PARTS[name].render(results.rows(name))}", flush=True)


if __name__ == "__main__":
    main()
