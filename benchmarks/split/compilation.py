"""Time to the end of the first microbatch, in a fresh process: autosplit over torch.compile.

Run as a module this is that process: ``python -m benchmarks.split.compilation MODEL WAY`` prints
the seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..results import Rows, Target, table, verdicts
from .contenders import compiled, microbatch
from .models import SIZES, Settings

WAYS = ("torch.compile", "autosplit")
COLD = Target("cold / torch.compile cold", at_most=1.3, style=".2f")
WARM = Target("warm / torch.compile cold", at_most=0.2, style=".2f")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model: cold with an empty cache, warm in a second process after it."""
    for model in settings.models:
        seconds: dict[str, dict[str, float]] = {}
        for way in WAYS:
            with tempfile.TemporaryDirectory() as cache:
                seconds[way] = {
                    state: _in_process(settings, model, way, cache) for state in ("cold", "warm")
                }
        yield {"name": model, "seconds": seconds}


def _in_process(settings: Settings, model: str, way: str, cache: str) -> float:
    command = [sys.executable, "-m", __name__, model, way, "--size", settings.size]
    command += ["--device", settings.device, "--threads", str(max(settings.threads))]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def render(rows: Rows) -> str:
    headers = ["", "torch.compile s", "warm", "autosplit s", "warm", COLD.title, WARM.title]
    cells, cold, warm = [], {}, {}
    for row in rows:
        theirs, ours = (row["seconds"][way] for way in WAYS)
        cold[row["name"]] = ours["cold"] / theirs["cold"]
        warm[row["name"]] = ours["warm"] / theirs["cold"]
        times = [theirs["cold"], theirs["warm"], ours["cold"], ours["warm"]]
        ratios = [COLD.cell(cold[row["name"]]), WARM.cell(warm[row["name"]])]
        cells.append([row["name"], *(f"{value:.1f}" for value in times), *ratios])
    return f"{table(headers, cells)}\n\n{verdicts([(COLD, cold), (WARM, warm)])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = Settings((options.model,), (options.threads,), 1, options.device, options.size)
    subject = settings.subject(options.model)
    make = compiled(subject)[options.way]
    start = time.perf_counter()
    microbatch(make(), subject)
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
