"""``python -m benchmarks.paper [TABLE ...]`` measures and writes the README of each table."""

from __future__ import annotations

import argparse
import pathlib
import shlex
from collections.abc import Sequence

from tqdm import tqdm

from ..page import parse, quiet
from ..results import Results, describe
from .overview import overview
from .settings import FAMILIES, SIZES, Settings
from .tables import MEASUREMENTS, TABLES, complete, needed, page
from .theory import BY_LABEL

HERE = pathlib.Path(__file__).parent


@quiet()
def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    settings = Settings(
        size=options.size,
        families=tuple(options.families),
        schedules=tuple(options.schedules),
        steps=options.steps,
        rounds=options.rounds,
        scaling_steps=options.scaling_steps,
        ranks=tuple(options.ranks),
        unit=options.unit,
        profiling=options.profiling,
    )
    chosen = options.tables or [*TABLES]
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results.read(options.output / "results.json")
    measured = [] if options.pages else needed(chosen)
    for name in measured:
        rows = tqdm(MEASUREMENTS[name](settings, results), desc=name, mininterval=5)
        results.update(name, [*rows], _command(*options.tables), describe())
    for name, table in TABLES.items():
        touched = name in chosen or set(table.needs) & set(measured)
        if touched and complete(name, results):
            folder = options.output / name
            folder.mkdir(exist_ok=True)
            text = page(name, results, _command(name), describe())
            (folder / "README.md").write_text(text)
    (options.output / "README.md").write_text(overview(results))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=[*FAMILIES], choices=FAMILIES)
    parser.add_argument("--schedules", nargs="+", default=[*BY_LABEL], choices=BY_LABEL)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each contender")
    parser.add_argument("--rounds", type=int, default=9, help="timed microbatches of a stage alone")
    parser.add_argument("--scaling-steps", type=int, default=3, help="timed, of each stand-in")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8, 16], help="of stand-ins")
    parser.add_argument(
        "--unit", type=float, default=0.06, help="seconds of F + I + W of a stand-in"
    )
    parser.add_argument(
        "--profiling", type=float, default=10.0, help="seconds of profiling a model to cut it"
    )
    parser.add_argument("--pages", action="store_true", help="only write pages anew")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    return parse(parser, TABLES, "table", arguments)


def _command(*tables: str) -> str:
    return shlex.join(["python", "-m", "benchmarks.paper", *tables])


if __name__ == "__main__":
    main()
