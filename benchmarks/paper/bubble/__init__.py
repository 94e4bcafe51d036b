"""Bubble ratios: the formulas, the engine over stages of equal times, and the families."""

from __future__ import annotations

from collections.abc import Mapping

from autosplit.pipeline.simulation.simulate import simulate

from ...results import Rows, table
from ..cells import RANKS, pair
from ..scaling import EQUAL, bubble_of
from ..theory import BY_LABEL, SCHEDULES


def render(rows: Mapping[str, Rows]) -> str:
    """Two tables: F = I = W by N, and the families on two ranks."""
    parts = [
        """\
F = I = W, a stage on each rank, M = 1, N, N and 2N. *Formula* is that of the schedule as the
paper places its Ws, *simulated* the same from the engine's own action lists, *measured* the engine
over stages that sleep, and *ours* autosplit's placement of Ws, which the trainer takes.""",
        _equal(rows["scaling"]),
        f"""\
The families on {RANKS} real ranks. *Ideal* is simulated from the durations of this run; the first
stage has no input gradient, so its I is empty and its W the whole backward.""",
        _families(rows["cells"]),
    ]
    return "\n\n".join(parts)


def _equal(rows: Rows) -> str:
    mine = [row for row in rows if row["family"] == EQUAL]
    found = {(row["ranks"], row["label"], row["variant"]): row for row in mine}
    ranks = sorted({row["ranks"] for row in mine})
    cells = []
    for count in ranks:
        for each in (each for each in SCHEDULES if (count, each.label, "fused") in found):
            for split in (False, True):
                formula = float((each.split_bubble if split else each.fused_bubble)(count))
                schedule = each.build(count, split=split, weights="2bp" if split else None)
                simulated = simulate(schedule, lambda a: 2.0 if a.kind.value == "B" else 1.0)
                measured = bubble_of(found[count, each.label, "2bp" if split else "fused"])
                ours = f"{bubble_of(found[count, each.label, 'split']):.3f}" if split else ""
                cells.append(
                    [
                        str(count),
                        each.label,
                        "split" if split else "fused",
                        f"{formula:.3f}",
                        f"{simulated.bubble_ratio():.3f}",
                        f"{measured:.3f}",
                        ours,
                    ]
                )
    return table(["N", "schedule", "backward", "formula", "simulated", "measured", "ours"], cells)


def _families(rows: Rows) -> str:
    cells = [
        [
            cell.family,
            cell.label,
            "split" if row["split"] else "fused",
            f"{float(_formula(cell.label, row['split'])):.3f}",
            f"{row['ideal_bubble']:.3f}",
            f"{row['bubble']:.3f}",
        ]
        for cell in pair(rows)
        for row in (cell.fused, cell.split)
    ]
    headers = ["family", "schedule", "backward", "formula, F = I = W", "ideal", "measured"]
    return table(headers, cells)


def _formula(label: str, split: bool) -> float:
    each = BY_LABEL[label]
    return float((each.split_bubble if split else each.fused_bubble)(RANKS))
