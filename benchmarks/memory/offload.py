"""Offload into a memory-mapped file, on two ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.offload_target import open_offload_target
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.remedies import offload
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Transfer

from ..results import Rows, Target, table, verdicts
from .settings import Settings
from .standin import Case, costs, measure, slower

RANKS, MICROBATCHES = 2, 8
UNIT = 0.06  # seconds of F, of I and of W
SCHEDULES = (("gpipe", "gpipe", True), ("1f1b, fused", "1f1b", False), ("zb-h1", "zb-h1", True))
PEAK = Target("largest peak / plain", at_most=0.55, style=".2f")
_PIECE, _PIECES = 2**20, 64  # bytes, and how many of them


def measure_all(settings: Settings) -> Iterator[dict[str, Any]]:
    """Each schedule as it is and offloaded, at no cost and as far as it goes."""
    unit = UNIT / (4 if settings.size == "tiny" else 1)
    with tempfile.TemporaryDirectory() as folder:
        speed = bandwidth(Path(folder))
        known = costs(RANKS, (unit, unit, unit), Transfer(host=Link(bandwidth=speed)))
        for title, name, split in SCHEDULES:
            plain = build(name, RANKS, MICROBATCHES, split_backward=split)
            ways = {"plain": plain, "at no cost": offload(plain, known)}
            ways["as far as it goes"] = least(plain, known)
            cases = [
                Case(way, schedule, known.times[0], None if schedule == plain else Path(folder))
                for way, schedule in ways.items()
            ]
            found = measure(cases, steps=settings.steps)
            for each in found:
                if each.losses != found[0].losses:
                    raise AssertionError(f"{title}, {each.name}: other losses than without")
                yield {
                    "name": f"{title}, {each.name}",
                    "way": each.name,
                    "peaks": each.peaks,
                    "predicted": each.predicted,
                    "seconds": each.seconds,
                    "bandwidth": speed,
                    "peak": max(each.peaks) / max(found[0].peaks),
                    "step": slower(each, found[0]),
                }


def bandwidth(folder: Path) -> float:
    """Bytes a second into the store, as a rank offloads; the pages stay in the system's cache."""
    store = open_offload_target(torch.device("cpu"), folder)
    pieces = [torch.zeros(_PIECE, dtype=torch.uint8) for _ in range(_PIECES)]
    start = time.perf_counter()
    tickets = [store.put(piece) for piece in pieces]
    seconds = time.perf_counter() - start
    for ticket in tickets:
        store.take(ticket, torch.empty(_PIECE, dtype=torch.uint8))
    return _PIECE * _PIECES / seconds


def least(plain: Schedule, known: Costs) -> Schedule:
    """The offloaded schedule with the least limit, in hundredths of the plain peak."""
    highest = max(peak_memory(plain, known.memory))
    for share in range(20, 100, 2):
        try:
            return offload(plain, known, highest * share / 100)
        except ScheduleError:
            continue
    return plain


def render(rows: Rows) -> str:
    """A row a way."""
    cells = []
    for row in rows:
        plain = row["way"] == "plain"
        cells.append(
            [
                row["name"],
                " ".join(f"{each / 2**20:.1f}" for each in row["peaks"]),
                "" if plain else PEAK.cell(row["peak"]),
                "" if plain else f"{row['step']:.3f}",
                "" if plain else f"{row['bandwidth'] / 2**30:.1f}",
            ]
        )
    headers = ["", "activations MiB by rank", PEAK.title, "step / plain", "store GiB/s"]
    judged = {row["name"]: row["peak"] for row in rows if row["way"] == "as far as it goes"}
    return f"{table(headers, cells)}\n\n{verdicts([(PEAK, judged)])}"
