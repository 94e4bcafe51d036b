"""``python -m benchmarks.torch_pipelining`` measures and writes its README."""

from __future__ import annotations

import argparse
import functools
import pathlib
import shlex
import tempfile
from collections.abc import Sequence

from ..command import parse
from ..environment import describe
from ..malloc import restart_keeping
from ..results import Results
from .measure import COUNTS, OVERRIDES, Settings, measure
from .page import write
from .schedules import ENTRIES

HERE = pathlib.Path(__file__).parent
QUICK = {"rounds": 3, "microbatches": [4], "seq": 32}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results.read(options.output / "results.json")
    settings = Settings(
        tuple(options.schedules or ENTRIES),
        tuple(options.microbatches),
        rounds=options.rounds,
        overrides={**OVERRIDES, "seq": str(options.seq)},
    )
    model = ", ".join(f"{name} {value}" for name, value in settings.overrides.items())
    measure(
        settings,
        functools.partial(
            write, results, model, command=_command(options), environment=describe(threads=1)
        ),
    )
    print((options.output / "README.md").read_text())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[*COUNTS], choices=COUNTS)
    parser.add_argument("--seq", type=int, default=int(OVERRIDES["seq"]), help="tokens a sample")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs; elsewhere")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    options = parse(parser, ENTRIES, "schedule", arguments)
    if options.quick:
        vars(options).update(QUICK)
        if options.output == HERE:
            options.output = pathlib.Path(tempfile.mkdtemp())
    return options


def _command(options: argparse.Namespace) -> str:
    words = ["python", "-m", "benchmarks.torch_pipelining", *options.schedules]
    words += ["--rounds", str(options.rounds), "--seq", str(options.seq), "--microbatches"]
    return shlex.join([*words, *map(str, options.microbatches)])


if __name__ == "__main__":
    restart_keeping("benchmarks.torch_pipelining")
    main()
