"""``python -m benchmarks.startup`` measures and writes ``benchmarks/startup/README.md``."""

from __future__ import annotations

import argparse
import pathlib
import shlex

from tqdm import tqdm

from ..command import parse
from ..environment import describe
from ..results import Results
from .measure import Settings
from .models import MODELS
from .page import PARTS, page

HERE = pathlib.Path(__file__).parent
LAYERS = {"eager": (2, 8, 32, 80), "inductor": (2, 8), "lengths": (2, 8, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument(
        "--layers",
        nargs="+",
        type=int,
        help="2 8 32 80, with Inductor 2 8, of lengths 2 8 32",
    )
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    options = parse(parser, PARTS)
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results.read(options.output / "results.json")
    for name in options.parts or PARTS:
        layers = tuple(options.layers or LAYERS[name])
        settings = Settings(tuple(options.models), layers, options.turns)
        command = ["python", "-m", "benchmarks.startup", name, "--turns", str(options.turns)]
        total = len(settings.models) * len(settings.layers)
        # One row at a time: what was found is kept, whatever ends the run.
        for row in tqdm(PARTS[name].measure(settings), desc=name, total=total, mininterval=5):
            results.update(name, [row], shlex.join(command), describe(threads=1))
            (options.output / "README.md").write_text(page(results))


if __name__ == "__main__":
    main()
