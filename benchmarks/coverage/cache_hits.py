"""What a second process finds in the graph cache, and whether that is right.

Run as a module this is such a process: it examines the architectures whose names it is given and
prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import autosplit

from ..results import Rows, table
from .examine import Verdict, examine
from .results import group, row

FOUND = "found"
IN_PARTS = "in parts"
SAME = (Verdict.EQUAL.value, Verdict.CLOSE.value)
_BATCH = 30  # architectures for one process


def measure(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each architecture: what the cache had for a second process after a first, and how
    its gradients compare with plain autograd's.
    """
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        with tempfile.TemporaryDirectory() as folder:
            first, second = (_in_process(batch, folder) for _ in range(2))
        for before, after in zip(first, second, strict=True):
            yield {**after, "seconds": [before["seconds"], after["seconds"]]}


def _in_process(names: Sequence[str], folder: str) -> Rows:
    command = [sys.executable, "-m", __name__, *names]
    environment = os.environ | {"AUTOSPLIT_CACHE": os.path.join(folder, "graphs")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _examined(name: str) -> dict[str, Any]:
    from . import architectures

    family, subject = next(each for each in architectures.subjects() if each[1].name == name)
    made: list[autosplit.SplitModule] = []

    def split(model: nn.Module) -> autosplit.SplitModule:
        made.append(autosplit.split(model))
        return made[-1]

    finding = examine(subject, split)
    outcomes = [each.capture.entry for split_module in made for each in split_module.functions]
    texts = {"off" if entry is None else entry.outcome for entry in outcomes}
    outcome = IN_PARTS if finding.in_parts or not texts else " and ".join(sorted(texts))
    return {**row(finding, family), "cache": outcome, "seconds": finding.seconds}


def render(rows: Rows) -> str:
    """Hits by family, then what is no hit, with why."""
    if not rows:
        return "Not run."
    cells = []
    for family, each in group(rows).items():
        found = [one for one in each if one["cache"] == FOUND]
        right = sum(one["verdict"] in SAME for one in found)
        before, after = (sum(one["seconds"][at] for one in found) for at in (0, 1))
        ratio = f"{after / before:.2f}" if before else ""
        cells.append([family, f"{len(found)} of {len(each)}", f"{right} of {len(found)}", ratio])
    headers = ["family", "found", "of these equal", "seconds, second / first process"]
    others = Counter(one["cache"] for one in rows if one["cache"] != FOUND)
    reasons = [
        [count, reason, ", ".join(one["name"] for one in rows if one["cache"] == reason)]
        for reason, count in others.most_common()
    ]
    hits = sum(one["cache"] == FOUND for one in rows)
    lines = [f"{hits} of {len(rows)} cases.", table(headers, cells)]
    if reasons:
        lines.append(table(["cases", "not found", "which"], reasons))
    return "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    for name in options.names:
        print(json.dumps(_examined(name)), flush=True)


if __name__ == "__main__":
    main()
