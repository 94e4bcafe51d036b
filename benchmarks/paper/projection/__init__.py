"""From stages measured on a GPU at the paper's sizes to N GPUs, by simulation."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory

from ...pipeline.standin import Case
from ...results import Rows, table
from ..scaling import case_of
from ..settings import Settings
from ..theory import SCHEDULES, PaperSchedule, verdict

STORED = pathlib.Path(__file__).parents[2] / "results"
RANKS = (4, 8, 16)
NOTHING = (
    f"there is nothing to project from: no stage has been timed on a GPU, and {STORED} has no "
    "figures of any. Run `python -m benchmarks.paper.projection` where there is a CUDA device "
    "first; for times of this machine's CPU, see the table `scaling`"
)


def measure(settings: Settings, folder: pathlib.Path = STORED) -> Iterator[dict[str, Any]]:
    """What ``python -m benchmarks.paper.projection`` stored in ``folder``, a row for each stage."""
    for file in sorted(folder.glob("*.json")):
        for row in json.loads(file.read_text()).get("stages", []):
            yield {**row, "name": f"{file.stem}: {row['family']}"}


def project(row: Mapping[str, Any], each: PaperSchedule, ranks: int) -> dict[str, float]:
    """Seconds of a step and bytes of activations of the fullest rank, fused and split.

    The stage that was measured is ``share`` of the model; each of N stages is 1 / N of it.
    """
    scale = 1.0 / (row["share"] * ranks)
    forward, backward_input, backward_weight = (scale * row["ms"][kind] / 1e3 for kind in "FIW")
    times = (forward, backward_input, backward_weight)
    memory = StageMemory(scale * row["saved"], scale * row["deferred"])
    found = {}
    for variant in ("fused", "split"):
        case: Case = case_of(each, ranks, variant, times)
        found[variant] = case.costs.timeline(case.schedule).makespan
        found[f"{variant} bytes"] = max(peak_memory(case.schedule, [memory] * ranks))
    return found


def render(rows: Mapping[str, Rows]) -> str:
    """A table of all devices."""
    stages = rows["projection"]
    cells = []
    for row in stages:
        for ranks in RANKS:
            for each in SCHEDULES:
                found = project(row, each, ranks)
                cells.append(
                    [
                        row["name"],
                        str(ranks),
                        each.label,
                        *(f"{1e3 * found[variant]:.1f}" for variant in ("fused", "split")),
                        f"{found['fused'] / found['split']:.3f}x",
                        *(f"{found[f'{v} bytes'] / 2**30:.2f}" for v in ("fused", "split")),
                    ]
                )
    devices = "; ".join(dict.fromkeys(row["environment"] for row in stages))
    headers = ["stage", "N", "schedule", "fused ms", "split ms", "speed-up", "fused GiB"]
    return f"""\
**A projection, not a measurement**: F, I, W and what a stage keeps were measured on one device
({devices}); steps are simulated with messages that take no time, and GiB are activations alone.

{table([*headers, "split GiB"], cells)}

{verdict()}"""
