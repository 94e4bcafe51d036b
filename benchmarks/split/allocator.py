"""What the C library's giving memory back between actions adds to a microbatch.

Run as a module this measures one model in the process as it is:
``python -m benchmarks.split.allocator MODEL`` prints rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..malloc import KEEPING
from ..results import Rows, table
from .clock import interleave, ratio
from .contenders import Contender, eager
from .models import SIZES, Subject
from .run import microbatch
from .settings import Settings

WAYS: Mapping[str, dict[str, str]] = {"as it comes": {}, "keeping": KEEPING}
_CONTENDERS = ("autograd", "autosplit")
_COUNTED = 5


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model, way and number of threads, a process for each model and way."""
    for model in settings.models:
        for way, added in WAYS.items():
            for row in _in_process(settings, model, added):
                yield {**row, "name": f"{model}, {way}, threads: {row['threads']}"}


def _in_process(settings: Settings, model: str, added: dict[str, str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", __name__, model, "--size", settings.size]
    command += ["--rounds", str(settings.rounds), "--threads", *map(str, settings.threads)]
    environment = {name: value for name, value in os.environ.items() if name not in KEEPING}
    done = subprocess.run(
        command, env=environment | added, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def render(rows: Rows) -> str:
    """A table."""
    headers = ["", "autograd ms", "page faults", "autosplit ms", "page faults", "ratio", "spread"]
    cells = []
    for row in rows:
        pairs = [(f"{row['ms'][name]:.1f}", str(row["faults"][name])) for name in _CONTENDERS]
        figures = [cell for pair in pairs for cell in pair]
        cells.append([row["name"], *figures, f"{row['ratio']:.3f}", f"{row['spread']:.3f}"])
    return table(headers, cells)


def _here(subject: Subject, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    builders = eager(subject)
    contenders = {name: builders[name]() for name in _CONTENDERS}
    found = interleave(contenders, subject, rounds)
    middle, spread = ratio(found["autosplit"], found["autograd"])
    return {
        "threads": threads,
        "ms": {name: sum(each.medians().values()) for name, each in found.items()},
        "faults": {name: _faults(each, subject) for name, each in contenders.items()},
        "ratio": middle,
        "spread": spread,
    }


def _faults(contender: Contender, subject: Subject) -> int:
    """Pages that a microbatch makes the system map, once it runs as it always will."""
    before = 0
    for index in range(_COUNTED + 2):
        if index == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        microbatch(contender, subject)
        contender.clear()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // _COUNTED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    threads = tuple(options.threads)
    settings = Settings(options.size, "cpu", (options.model,), threads, options.rounds)
    subject = settings.subject(options.model)
    print(json.dumps([_here(subject, count, options.rounds) for count in threads]))


if __name__ == "__main__":
    main()
