"""Activation balancing over stand-in stages whose transfers are real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.search.remedies import balance
from autosplit.pipeline.simulation.step_graph import Transfer

from ..results import Rows, Target, table, verdicts
from .settings import Settings
from .standin import Case, Found, costs, measure, slower

UNITS = {2: 0.12, 4: 0.12, 8: 0.16}  # ranks -> seconds of an F: a message takes a few milliseconds
LINK = Transfer(1e-4, 1e9)
"""About what processes of one machine reach over Gloo, for which the least bound is planned."""
BOUND = Target("largest peak / the paper's bound", at_most=1.05, style=".2f")
STEP = Target("step / plain", at_most=1.03)


def measure_all(settings: Settings) -> Iterator[dict[str, Any]]:
    """1F1B as it is, and with the paper's bound."""
    for ranks in settings.ranks:
        unit = UNITS.get(ranks, 0.16) / (4 if settings.size == "tiny" else 1)
        known = costs(ranks, (unit, unit, unit), LINK)
        plain = build("1f1b", ranks, 2 * ranks, split_backward=False)
        cases = [
            Case("plain", plain, known.times[0]),
            Case("the paper's bound", balance(plain), known.times[0]),
        ]
        found = measure(cases, steps=max(1, settings.steps // 4))
        for each in found:
            yield _row(f"N={ranks}, 1f1b, fused, {each.name}", ranks, each, found[0])


def _row(name: str, ranks: int, found: Found, plain: Found) -> dict[str, Any]:
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
        "bound": max(found.peaks) / max(plain.peaks) / (((ranks + 3) // 2) / ranks),
        "step": slower(found, plain),
    }


def render(rows: Rows) -> str:
    """A row a way, and verdicts on 1F1B under the paper's bound."""
    cells = []
    for row in rows:
        plain = row["way"] == "plain"
        cells.append(
            [
                row["name"],
                " ".join(f"{each / 2**20:.1f}" for each in row["peaks"]),
                f"{row['even']:.2f}",
                "" if plain else f"{row['peak']:.2f}",
                "" if plain else BOUND.cell(row["bound"]),
                "" if plain else STEP.cell(row["step"]),
            ]
        )
    headers = [
        "",
        "activations MiB by rank",
        "largest / smallest peak",
        "largest peak / plain",
        BOUND.title,
        STEP.title,
    ]
    bounded = [row for row in rows if row["way"] != "plain"]
    figures = {
        target: {row["name"]: row[key] for row in bounded}
        for target, key in ((BOUND, "bound"), (STEP, "step"))
    }
    return f"{table(headers, cells)}\n\n{verdicts([*figures.items()])}"
