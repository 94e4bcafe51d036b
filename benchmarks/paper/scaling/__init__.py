"""More ranks than cores: the engine over stages that sleep for the families' F, I and W."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.launch import launch

from ...pipeline.standin import Case, Times, batch_of, makespans, trainer_of
from ...results import Rows, table
from ..settings import Settings
from ..theory import BY_LABEL, PUBLISHED_RANKS, PUBLISHED_THROUGHPUT, PaperSchedule

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


def render(rows: Mapping[str, Rows]) -> str:
    """Speed-ups of split over fused by N, and how near the engine comes to its simulation."""
    mine = rows["scaling"]
    found = {(row["ranks"], row["family"], row["label"], row["variant"]): row for row in mine}
    counts = sorted({row["ranks"] for row in mine})
    cells = []
    for family, label in dict.fromkeys((row["family"], row["label"]) for row in mine):
        pairs = [
            (found.get((count, family, label, "fused")), found.get((count, family, label, "split")))
            for count in counts
        ]
        ratios = [_ratio(fused, split, key) for key in KEYS for fused, split in pairs]
        cells.append([family, label, *ratios])
    worst = max(row["measured"] / row["simulated"] for row in mine)
    spread = max(row["spread"] / row["measured"] for row in mine)
    units = sorted({round(1e3 * sum(row["times"])) for row in mine})
    headers = [f"{kind}N={count}" for kind in ("", "simulated, ") for count in counts]
    ideal = BY_LABEL["1F1B-1"].ideal_speedup(PUBLISHED_RANKS)
    return f"""\
{table(["times of", "schedule", *headers], cells)}

F + I + W of a stage takes {" or ".join(map(str, units))} ms. Measured steps take {worst:.3f} times
their simulation at most; the largest spread of a median is {spread:.1%}. The paper's
{PUBLISHED_THROUGHPUT[1]:.2f}x at N = {PUBLISHED_RANKS} under 1F1B-1 has {float(ideal):.2f}x as its
ideal with Ws where the paper puts them."""


def _ratio(fused: Mapping[str, Any] | None, split: Mapping[str, Any] | None, key: str) -> str:
    """Speed-up, or nothing where the pair was not measured at this N."""
    return f"{fused[key] / split[key]:.3f}x" if fused and split else ""
