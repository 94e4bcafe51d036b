"""``python -m benchmarks.split`` measures and writes ``benchmarks/split/README.md``."""

from __future__ import annotations

import argparse
import logging
import pathlib
import shlex
import warnings

from tqdm import tqdm

from ..command import parse
from ..environment import describe
from ..malloc import restart_keeping
from ..results import Results
from .models import SIZES
from .page import PARTS, page
from .settings import Settings

HERE = pathlib.Path(__file__).parent


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    settings = Settings(
        size=options.size,
        device=options.device,
        models=tuple(options.models),
        threads=tuple(options.threads),
        rounds=options.rounds,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results.read(options.output / "results.json")
    for name in options.parts or PARTS:
        # One row at a time: what was found is kept, whatever ends the run.
        for row in tqdm(PARTS[name].measure(settings), desc=name, mininterval=5):
            key = name if options.device == "cpu" else f"{name} on {options.device}"
            results.update(key, [row], _command(name, options), _environment(settings))
            (options.output / "README.md").write_text(page(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*SIZES["small"]], choices=SIZES["small"])
    parser.add_argument("--threads", nargs="+", type=int, help="1 and 2 by default; 1 on CUDA")
    parser.add_argument("--rounds", type=int, default=15, help="timed microbatches of each")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", choices=SIZES, help="small by default; large on CUDA")
    parser.add_argument("--output", type=pathlib.Path, default=HERE, help="folder to write to")
    parser.add_argument("--as-it-comes", action="store_true", help="leave malloc as it is")
    options = parse(parser, PARTS)
    options.threads = options.threads or ([1] if options.device == "cuda" else [1, 2])
    options.size = options.size or ("large" if options.device == "cuda" else "small")
    return options


def _environment(settings: Settings) -> str:
    return describe(threads=max(settings.threads))


def _command(part: str, options: argparse.Namespace) -> str:
    """What to type for the whole of this part: a run in pieces ends up with the same rows."""
    words = ["python", "-m", "benchmarks.split", part, "--rounds", str(options.rounds)]
    if options.device != "cpu":
        words += ["--device", options.device]
    if options.as_it_comes:
        words.append("--as-it-comes")
    return shlex.join(words)


def _restart() -> None:
    """Malloc reads its settings at the start of a process only; a caller's is left alone."""
    options = _options()
    if options.device == "cpu" and not options.as_it_comes:
        restart_keeping("benchmarks.split")


if __name__ == "__main__":
    _restart()
    main()
