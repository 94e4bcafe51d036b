"""``python -m benchmarks.issues`` runs every reproducer and writes ``benchmarks/issues/README.md``.

Run under another version of torch, it adds a column.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tqdm import tqdm

from ..command import parse
from ..environment import describe
from ..results import Results
from .case import Case
from .cases import CASES
from .judge import judge
from .page import render

HERE = pathlib.Path(__file__).parent
SIDES = ("stock", "ours")
TIMEOUT = 60.0


def main() -> int:
    """Run the cases, and say 1 if one did not come out as it claims."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.issues", description=__doc__)
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds until a hang")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    options = parse(parser, CASES, "case")
    results = Results.read(HERE / "results.json")
    chosen = [CASES[name] for name in options.cases or CASES]
    command = " ".join(["python -m benchmarks.issues", *options.cases])
    version = torch.__version__.partition("+")[0]
    false = []
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(lambda case: row_of(case, options.timeout), chosen)
        for row in tqdm(rows, total=len(chosen), mininterval=5):
            results.update(version, [row], command, describe(threads=1))
            for side in SIDES:
                if not row[side]["claimed"]:
                    false.append(
                        f"{row['name']}, {side}: {row[side]['state']}: {row[side]['text']}"
                    )
                    tqdm.write(false[-1])
    (HERE / "README.md").write_text(render(results, CASES))
    return int(bool(false))


def row_of(case: Case, timeout: float) -> dict[str, Any]:
    """Both sides of a case."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    sides = {side: dataclasses.asdict(judge(case, side, version, timeout)) for side in SIDES}
    return {"name": case.name, **sides}


if __name__ == "__main__":
    sys.exit(main())
