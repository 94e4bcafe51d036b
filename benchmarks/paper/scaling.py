"""More ranks than cores: the engine over stages that sleep for the families' F, I and W."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.ranks.launch import launch

from ..pipeline.standin import Case, Times, batch_of, makespans, trainer_of
from ..results import Rows, table
from .settings import Settings
from .theory import BY_LABEL, PUBLISHED_RANKS, PUBLISHED_THROUGHPUT, SCHEDULES, PaperSchedule

EQUAL = "F = I = W"
TIMEOUT = 900.0
KEYS = ("measured", "simulated")


def measure(settings: Settings, stages: Rows) -> Iterator[dict[str, Any]]:
    """A row for each N, family, schedule and variant; ``stages``: as `stages.measure` gives."""
    chosen = [BY_LABEL[label] for label in settings.schedules]
    ratios: dict[str, Times] = {EQUAL: (1.0, 1.0, 1.0)}
    for row in (row for row in stages if row["name"] in settings.families):
        ratios[row["name"]] = (row["ms"]["F"], row["ms"]["I"], row["ms"]["W"])
    for ranks in settings.ranks:
        scaled = {family: _times(ratio, settings.unit) for family, ratio in ratios.items()}
        cases = {
            (family, each.label, variant): case_of(each, ranks, variant, times)
            for family, times in scaled.items()
            for each in chosen
            for variant in (("fused", "split", "2bp") if family == EQUAL else ("fused", "split"))
        }
        args = (list(cases.values()), settings.scaling_steps)
        found = launch(_on_rank, ranks, args, timeout=TIMEOUT)[0]
        for ((family, label, variant), case), spans in zip(cases.items(), found, strict=True):
            yield {
                "name": f"N={ranks}, {family}, {label}, {variant}",
                "ranks": ranks,
                "family": family,
                "label": label,
                "variant": variant,
                "microbatches": case.schedule.microbatches,
                "times": case.times,
                "simulated": case.costs.timeline(case.schedule).makespan,
                "measured": statistics.median(spans),
                "spread": max(spans) - min(spans),
            }


def case_of(each: PaperSchedule, ranks: int, variant: str, times: Times) -> Case:
    """Variants: fused; split as the trainer places Ws; ``2bp``, as the paper does."""
    built = build(
        each.name,
        ranks,
        each.microbatches(ranks),
        split_backward=variant != "fused",
        weights="2bp" if variant == "2bp" else None,
        times=times if variant == "split" else None,
    )
    return Case(f"{each.label}, {variant}", built, times)


def bubble_of(row: Mapping[str, Any]) -> float:
    """Idle share: every rank is busy with F, I and W of every microbatch."""
    return 1.0 - float(row["microbatches"] * sum(row["times"]) / row["measured"])


def _times(ratio: Times, unit: float) -> Times:
    forward, backward_input, backward_weight = (unit * part / sum(ratio) for part in ratio)
    return (forward, backward_input, backward_weight)


def _on_rank(cases: list[Case], steps: int) -> list[list[float]]:
    found = []
    for case in cases:
        with trainer_of(case) as trainer:
            found.append(makespans(trainer, batch_of(case), steps))
    return found


def render(rows: Rows) -> str:
    """Speed-ups of split over fused by N, how near the engine comes to its simulation, and bubbles
    beside the paper's formulas.
    """
    found = {(row["ranks"], row["family"], row["label"], row["variant"]): row for row in rows}
    counts = sorted({row["ranks"] for row in rows})
    cells = []
    for family, label in dict.fromkeys((row["family"], row["label"]) for row in rows):
        pairs = [
            (found.get((count, family, label, "fused")), found.get((count, family, label, "split")))
            for count in counts
        ]
        ratios = [_ratio(fused, split, key) for key in KEYS for fused, split in pairs]
        cells.append([family, label, *ratios])
    worst = max(row["measured"] / row["simulated"] for row in rows)
    spread = max(row["spread"] / row["measured"] for row in rows)
    units = sorted({round(1e3 * sum(row["times"])) for row in rows})
    headers = [f"{kind}N={count}" for kind in ("", "simulated, ") for count in counts]
    ideal = BY_LABEL["1F1B-1"].ideal_speedup(PUBLISHED_RANKS)
    return f"""\
{table(["times of", "schedule", *headers], cells)}

F + I + W of a stage takes {" or ".join(map(str, units))} ms. Measured steps take {worst:.3f} times
their simulation at most; the largest spread of a median is {spread:.1%}. The paper's
{PUBLISHED_THROUGHPUT[1]:.2f}x at N = {PUBLISHED_RANKS} under 1F1B-1 has {float(ideal):.2f}x as its
ideal with Ws where the paper puts them.

Bubble ratios for F = I = W. *Formula* is that of the schedule as the paper places its Ws,
*simulated* the same from the engine's own action lists, *measured* the engine over stages that
sleep, and *ours* autosplit's placement of Ws, which the trainer takes.

{_bubbles(rows)}"""


def _bubbles(rows: Rows) -> str:
    found = {(r["ranks"], r["label"], r["variant"]): r for r in rows if r["family"] == EQUAL}
    cells = []
    for count in sorted({row["ranks"] for row in rows}):
        for each in (each for each in SCHEDULES if (count, each.label, "fused") in found):
            for split in (False, True):
                formula = float((each.split_bubble if split else each.fused_bubble)(count))
                schedule = each.build(count, split=split, weights="2bp" if split else None)
                simulated = simulate(schedule, lambda a: 2.0 if a.kind.value == "B" else 1.0)
                measured = bubble_of(found[count, each.label, "2bp" if split else "fused"])
                ours = f"{bubble_of(found[count, each.label, 'split']):.3f}" if split else ""
                start = [str(count), each.label, "split" if split else "fused", f"{formula:.3f}"]
                figures = [f"{simulated.bubble_ratio():.3f}", f"{measured:.3f}", ours]
                cells.append([*start, *figures])
    return table(["N", "schedule", "backward", "formula", "simulated", "measured", "ours"], cells)


def _ratio(fused: Mapping[str, Any] | None, split: Mapping[str, Any] | None, key: str) -> str:
    """Speed-up, or nothing where the pair was not measured at this N."""
    return f"{fused[key] / split[key]:.3f}x" if fused and split else ""
