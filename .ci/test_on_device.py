"""Run the tests on a device, then compare F, I and W with ``torch.compile`` there.

Ends in two tables: what passed, and the benchmark's times. Everything that was measured lies in
``build/on-DEVICE``.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.results import Results  # noqa: E402
from benchmarks.split.page import PARTS  # noqa: E402
from tests import devices  # noqa: E402

COMPARED = ("eager", "inductor")
AT_ONCE = ("--numprocesses", "auto", "--dist", "loadfile", "--no-loadscope-reorder")
AS_THERE = ("--size", "large", "--threads", "1")


def main(name: str, chosen: list[str]) -> None:
    if said := devices.refusal(name):
        sys.exit(said)
    tests = run("pytest", "--device", name, *AT_ONCE, "-rfE", *chosen)
    where = ROOT / "build" / f"on-{name}"
    measured = run(
        "benchmarks.split", *COMPARED, *AS_THERE, "--device", name, "--output", str(where)
    )
    results = Results.read(where / "results.json")
    for part in COMPARED:
        if rows := results.rows(f"{part} on {name}"):
            print(f"\n{PARTS[part].title}, on {name}, milliseconds\n\n{PARTS[part].render(rows)}")
    sys.exit(tests or measured)


def run(module: str, *arguments: str) -> int:
    """How a Python program ended."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
