"""A 7B Llama is planned in a process of its own, which says how long it took and what it needed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from autosplit.mesh.costs import DeviceSpeed, measure_device
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, estimate
from autosplit.planner.cuts import solve
from autosplit.planner.meta_model import meta_model
from examples.families import FAMILIES, PAPER, TINY

from ..page import KEEPING
from ..results import Rows, mark, table

TARGET_SECONDS = 120.0
TARGET_BYTES = 4 * 2**30
STAGES = (4, 8, 16)
PEAK = DeviceSpeed(989e12, 3.35e12, 5e-6)
"""Of an NVIDIA H100 SXM, by its data sheet: products of 16 bits."""

_TIMEOUT = 600.0


def measure(*, tiny: bool = False) -> Iterator[dict[str, Any]]:
    """The plan for an accelerator and that for this machine, in processes with malloc as it is."""
    environment = {name: value for name, value in os.environ.items() if name not in KEEPING}
    for device in ("h100", "this CPU"):
        words = [sys.executable, "-m", __name__, device, *(["--tiny"] if tiny else [])]
        done = subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=_TIMEOUT, env=environment
        )
        yield {"name": device, **json.loads(done.stdout.splitlines()[-1])}


def plan(device: str, *, tiny: bool) -> dict[str, Any]:
    """Plan the model into several numbers of stages, from its parameters' shapes."""
    start = time.perf_counter()
    family = FAMILIES["llama"](**(TINY if tiny else PAPER)["llama"])
    model = meta_model(family.build)
    whole = WholeModel.capture(model, family.example())
    captured = time.perf_counter()
    here = device == "this CPU"
    rates = measure_device() if here else PEAK
    options = BlockOptions(autocast=None if here else torch.bfloat16)
    costs = estimate(whole, options, device=rates)
    known = time.perf_counter()
    plans = []
    for stages in STAGES[: 1 if tiny else None]:
        found = solve(costs, stages, ScheduleRequest("1f1b", 2 * stages))
        times = [sum(each) for each in found.costs.times]
        plans.append(
            {
                "stages": stages,
                "cuts": [whole.blocks[index].name for index in found.firsts],
                "uneven": max(times) * len(times) / sum(times),
                "step": found.step,
            }
        )
    done = time.perf_counter()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": len(whole.blocks),
        "seconds": {
            "capture": captured - start,
            "costs": known - captured,
            "solve": done - known,
        },
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "plans": plans,
        "device": dataclasses.asdict(rates),
    }


def render(rows: Rows) -> str:
    """Seconds and memory, then the plans."""
    cells = []
    for row in rows:
        seconds = sum(row["seconds"].values())
        cells.append(
            [
                row["name"],
                f"{row['parameters'] / 1e9:.2f}e9",
                str(row["blocks"]),
                *(f"{row['seconds'][part]:.1f}" for part in ("capture", "costs", "solve")),
                mark(f"{seconds:.1f}", seconds <= TARGET_SECONDS),
                mark(f"{row['peak'] / 2**30:.2f}", row["peak"] <= TARGET_BYTES),
            ]
        )
    plans = [
        [
            row["name"],
            str(each["stages"]),
            f"{each['uneven']:.3f}",
            f"{each['step']:.3f}",
            ", ".join(f"`{name}`" for name in each["cuts"]) if each["stages"] == STAGES[0] else "",
        ]
        for row in rows
        for each in row["plans"]
    ]
    headers = ["for", "parameters", "blocks", "capture s", "costs s", "solve s", "all s", "GiB"]
    return "\n\n".join(
        [
            table(headers, cells),
            f"Targets: {TARGET_SECONDS:.0f} s and {TARGET_BYTES / 2**30:.0f} GiB.",
            table(["for", "N", "slowest / mean", "step s", "stages begin at"], plans),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    print(json.dumps(plan(options.device, tiny=options.tiny)))
