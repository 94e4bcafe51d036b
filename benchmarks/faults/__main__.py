"""``python -m benchmarks.faults`` tries every fault and writes ``benchmarks/faults/README.md``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from ..results import Results, describe, sources
from .cells import SILENT, Cell, cells
from .judge import judge
from .page import render

HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", default="", help="only faults whose name matches this pattern")
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds, for stops and sleeps")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--resume", action="store_true", help="skip what was good, same sources")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a cell of its own process
    options = parser.parse_args()
    if options.one is not None:
        cell = Cell(**json.loads(options.one))
        print(json.dumps(_row(cell, options.timeout)))
        return
    results = Results.read(HERE / "results.json")
    known = {row["name"]: row for row in results.rows("faults")}
    done = {
        name
        for name, row in known.items()
        if options.resume and row["good"] and row["sources"] == sources()
    }
    wanted = [c for c in cells() if re.search(options.select, c.name) and c.name not in done]
    command = "python -m benchmarks.faults" + (
        f" --select {options.select!r}" if options.select else ""
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(lambda cell: _apart(cell, options.timeout), wanted)
        for row in tqdm(rows, total=len(wanted), mininterval=5):
            if not row["good"]:
                tqdm.write(json.dumps(row))
            results.update("faults", [row], command, describe())
    (HERE / "README.md").write_text(render(results))


def _apart(cell: Cell, timeout: float) -> dict[str, Any]:
    """A cell in a process of its own, so that none sees what another left."""
    one = json.dumps(dataclasses.asdict(cell))
    command = [sys.executable, "-m", "benchmarks.faults", f"--timeout={timeout}", f"--one={one}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{cell.name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(cell: Cell, timeout: float) -> dict[str, Any]:
    finding = judge(cell, timeout)
    return {
        "name": cell.name,
        "ranks": cell.ranks,
        "waits": cell.fault in SILENT,
        "timeout": timeout,
        "good": finding.good,
        **dataclasses.asdict(finding),
    }


if __name__ == "__main__":
    main()
