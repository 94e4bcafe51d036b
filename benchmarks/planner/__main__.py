"""``python -m benchmarks.planner`` measures and writes ``benchmarks/planner/README.md``."""

from __future__ import annotations

import argparse
import pathlib
import shlex

from ..command import parse
from ..environment import describe
from ..malloc import restart_keeping
from ..results import Results
from .automatic import Amount
from .page import PARTS, page

HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=20, help="timed steps of each of two ways to cut"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of profiling, for each model")
    parser.add_argument("--tiny", action="store_true", help="tiny models: only that it works")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    options = parse(parser, PARTS)
    options.output.mkdir(parents=True, exist_ok=True)
    amount = Amount(options.steps, options.seconds, tiny=options.tiny)
    results = Results.read(options.output / "results.json")
    for name in options.parts or PARTS:
        words = ["python", "-m", "benchmarks.planner", name]
        for option in ("steps", "seconds"):
            words += [f"--{option}", str(getattr(options, option))]
        for row in PARTS[name].measure(amount):
            results.update(name, [row], shlex.join(words), describe(threads=1))
            (options.output / "README.md").write_text(page(results))
            print(f"\n{PARTS[name].render([row])}", flush=True)


if __name__ == "__main__":
    restart_keeping("benchmarks.planner")
    main()
