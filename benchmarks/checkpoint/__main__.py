"""``python -m benchmarks.checkpoint`` damages checkpoints, and times looking for damage."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

from ..command import parse
from .cost import cost
from .mutations import FORMS, search

PARTS = ("mutations", "cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="damaged checkpoints of each form")
    parser.add_argument("--seed", type=int, help="other ones than the last time")
    parser.add_argument("--mebibytes", type=int, default=256, help="of parameters, for the cost")
    options = parse(parser, PARTS)
    if "mutations" in (options.parts or PARTS):
        rows = []
        for form in FORMS:
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                outcomes = search(form, options.count, Path(folder), start=options.seed)
            rows.append({"form": form, **outcomes, "seconds": time.perf_counter() - started})
            print(f"{form}: {dict(outcomes)}", flush=True)
        print(tabulate(rows, headers="keys", floatfmt=".0f"))
    if "cost" in (options.parts or PARTS):
        with tempfile.TemporaryDirectory() as folder:
            rows = cost(options.mebibytes, Path(folder))
        print(tabulate(rows, headers="keys", floatfmt=".2f"))


if __name__ == "__main__":
    main()
