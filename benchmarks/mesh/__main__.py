"""``python -m benchmarks.mesh`` measures and writes ``benchmarks/mesh/README.md``."""

from __future__ import annotations

import argparse
import pathlib
import shlex

from ..command import parse
from ..environment import describe
from ..results import Results
from .page import PARTS, Settings, write

HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    parser.add_argument("--slice", action="store_true", help="of exactness, a few minutes' worth")
    options = parse(parser, PARTS)
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results.read(options.output / "results.json")
    for name in options.parts or PARTS:
        words = ["python", "-m", "benchmarks.mesh", name, "--steps", str(options.steps)]
        if options.only:
            words += ["--only", options.only]
        if options.slice:
            words += ["--slice"]
        rows = list(PARTS[name].measure(Settings(options.steps, options.only, options.slice)))
        results.update(name, rows, shlex.join(words), describe(threads=1))
        write(results)
        print(f"\n{PARTS[name].title}\n\n{PARTS[name].render(results.rows(name))}", flush=True)


if __name__ == "__main__":
    main()
