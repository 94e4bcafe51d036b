"""Activation balancing over stand-in stages whose transfers are real."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.memory.measures import balance
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer

from ..results import Rows, Target, table, verdicts
from .settings import Settings
from .standin import Case, Found, costs, measure, slower

UNITS = {2: 0.12, 4: 0.12, 8: 0.16}  # ranks -> seconds of an F: a message takes a few milliseconds
LINK = Transfer(1e-4, 1e9)
"""About what processes of one machine reach over Gloo, for which the least bound is planned."""
SCHEDULES = (("1f1b, fused", "1f1b", False), ("zb-h1", "zb-h1", True))
_LONGER = 1.02  # a step, as simulated
EVEN = Target("largest / smallest peak", at_most=1.15, style=".2f")
PEAK = Target("largest peak / plain", at_most=0.65, style=".2f")
STEP = Target("step / plain", at_most=1.03)


def measure_all(settings: Settings) -> Iterator[dict[str, Any]]:
    """Each schedule as it is, with the paper's bound, and with the least that can be kept."""
    for ranks in settings.ranks:
        unit = UNITS.get(ranks, 0.16) / (4 if settings.size == "tiny" else 1)
        known = costs(ranks, (unit, unit, unit), LINK)
        for title, name, split in SCHEDULES:
            plain = build(name, ranks, 2 * ranks, split_backward=split)
            cases = [
                Case("plain", plain, known.times[0]),
                Case("the paper's bound", balance(plain), known.times[0]),
                Case("the least bound", least(plain, known), known.times[0]),
            ]
            found = measure(cases, steps=max(1, settings.steps // 4))
            for each in found:
                yield _row(f"N={ranks}, {title}, {each.name}", each, found[0])


def least(plain: Schedule, known: Costs) -> Schedule:
    """The balanced schedule in which each pair of ranks holds least, whatever transfers take, in a
    step that is hardly longer; over bounds in hundredths of the plain peak.
    """
    bounds, found = peak_memory(plain, known.memory), plain
    highest, longest = max(bounds), _LONGER * known.timeline(plain).step_time
    for rank in range(len(bounds) // 2):
        half = (bounds[rank] + bounds[-1 - rank]) / 2
        for share in range(math.ceil(100 * half / highest), 100):
            tried = _bounded(plain, known, bounds, rank, highest * share / 100)
            if tried is not None and known.timeline(tried).step_time <= longest:
                found = tried
                break
        bounds = peak_memory(found, known.memory)
    return found


def _bounded(
    plain: Schedule, known: Costs, bounds: Sequence[float], rank: int, bound: float
) -> Schedule | None:
    """With one pair below a bound and all others below theirs, by order; None if that cannot be."""
    pair = rank, len(bounds) - 1 - rank
    asked = [bound if at in pair else each for at, each in enumerate(bounds)]
    try:
        tried = balance(plain, asked, costs=known)
    except ScheduleError:
        return None
    peaks = peak_memory(tried, known.memory)
    kept = all(peak <= each * ROUNDING for peak, each in zip(peaks, asked, strict=True))
    return tried if kept else None


def _row(name: str, found: Found, plain: Found) -> dict[str, Any]:
    if found.losses != plain.losses:
        raise AssertionError(f"{name}: other losses than without")
    return {
        "name": name,
        "way": found.name,
        "peaks": found.peaks,
        "predicted": found.predicted,
        "seconds": found.seconds,
        "even": max(found.peaks) / min(found.peaks),
        "peak": max(found.peaks) / max(plain.peaks),
        "step": slower(found, plain),
    }


def render(rows: Rows) -> str:
    """A row a way, and verdicts on 1F1B under the least bound."""
    cells = []
    for row in rows:
        plain, judged = row["way"] == "plain", _is_judged(row)
        cells.append(
            [
                row["name"],
                " ".join(f"{each / 2**20:.1f}" for each in row["peaks"]),
                EVEN.cell(row["even"]) if judged else f"{row['even']:.2f}",
                "" if plain else PEAK.cell(row["peak"]) if judged else f"{row['peak']:.2f}",
                "" if plain else STEP.cell(row["step"]),
            ]
        )
    headers = ["", "activations MiB by rank", EVEN.title, PEAK.title, STEP.title]
    fused = [row for row in rows if _is_judged(row)]
    figures = {
        target: {row["name"]: row[key] for row in fused}
        for target, key in ((EVEN, "even"), (PEAK, "peak"), (STEP, "step"))
    }
    return f"{table(headers, cells)}\n\n{verdicts([*figures.items()])}"


def _is_judged(row: Mapping[str, Any]) -> bool:
    """ZB-H1 holds as much on every rank as it is; the paper's bound is in whole microbatches."""
    return row["way"] == "the least bound" and "zb-h1" not in row["name"]
