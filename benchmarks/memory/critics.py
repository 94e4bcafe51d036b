"""What BPipe buys: projected steps of many ranks within a cap, from one measured stage.

Whether it pays was disputed (arXiv 2401.02088): moving activations saves no time by itself. It pays
where what it frees is used, for a larger microbatch that runs faster a sample, or in place of
recomputation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import autosplit
from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build as build_schedule
from autosplit.pipeline.engine.stages import stage_memory
from autosplit.pipeline.memory.balance import balance
from autosplit.pipeline.memory.measures import recompute
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from examples.families.settings import LlamaSettings

from ..results import Rows, table
from ..split.clock import interleave
from ..split.contenders import eager
from ..split.models import build
from .settings import Settings

RANKS, SAMPLES = 8, 32
SIZES = (1, 2)  # samples in a microbatch
ATTENTION = ("eager", "sdpa")
LINKS = {"fast": 0.1, "slow": 2.0}
"""How long what F saves is on its way to the partner, in F."""
CAPS = (1.3, 1.0, 0.7)
"""Of what plain 1F1B holds on its first rank with one sample in a microbatch."""
_WIDE: dict[str, Any] = {"layers": 1, "width": 384, "hidden": 1056, "heads": 6}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One layer on each rank, with so many samples in a microbatch."""

    costs: Costs
    samples: int


def measure_all(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each kernel, link and cap; one thread."""
    torch.set_num_threads(1)
    for attention in ATTENTION:
        layers = {size: _layer(attention, size, settings) for size in SIZES}
        for (link, share), cap in itertools.product(LINKS.items(), CAPS):
            plain = build_schedule("1f1b", RANKS, SAMPLES, split_backward=False)
            one = layers[1]
            held = max(one.costs.peaks(plain, one.costs.timeline(plain)))
            ways = [
                way
                for size, layer in layers.items()
                for way in _ways(size, _linked(layer, share), cap * held)
            ]
            yield {
                "name": f"{attention} attention, {link} link, cap {cap:.1f}",
                "larger": _per_sample(one) / _per_sample(layers[2]),
                "without": min((w for w in ways if not w[2]), key=lambda w: w[1], default=None),
                "with": min((w for w in ways if w[2]), key=lambda w: w[1], default=None),
            }


def _layer(attention: str, samples: int, settings: Settings) -> Measured:
    seq = 32 if settings.size == "tiny" else 256
    subject = build("llama", LlamaSettings(**_WIDE, seq=seq, microbatch_size=samples))
    module: Any = subject.module
    module.model.config.update({"_attn_implementation": attention})
    ms = interleave({"ours": eager(subject)["autosplit"]()}, subject, settings.rounds)["ours"]
    medians = ms.medians()
    times = (medians["F"] / 1e3, medians["I"] / 1e3, medians["W"] / 1e3)
    stage = autosplit.Stage(subject.module, [subject.x.detach().requires_grad_()])
    return Measured(Costs([times] * RANKS, [stage_memory(stage)] * RANKS), samples)


def _per_sample(layer: Measured) -> float:
    return sum(layer.costs.times[0]) / layer.samples


def _linked(layer: Measured, share: float) -> Measured:
    """Over links on which what F saves is on its way for so many F."""
    seconds, saved = share * layer.costs.times[0][0], layer.costs.memory[0].saved
    costs = dataclasses.replace(layer.costs, transfer=Transfer(0.0, saved / seconds))
    return dataclasses.replace(layer, costs=costs)


def _ways(size: int, layer: Measured, cap: float) -> Iterator[tuple[str, float, bool]]:
    """Those that keep the cap: name, seconds of a step, and whether microbatches move."""
    costs = layer.costs
    plain = build_schedule("1f1b", RANKS, SAMPLES // size, split_backward=False)
    makers: dict[str, Callable[[], Schedule]] = {
        "plain": lambda: plain,
        "recomputed": lambda: recompute(plain, costs, cap),
        "balanced": lambda: balance(plain, cap, costs=costs),
    }
    for name, make in makers.items():
        try:
            schedule = make()
        except ScheduleError:
            continue
        timeline = costs.timeline(schedule)
        if max(costs.peaks(schedule, timeline)) <= cap:
            text = f"{size} a microbatch, {name}"
            yield text, timeline.step_time, name == "balanced"


def render(rows: Rows) -> str:
    """A row a case: the best way without moving anything, the best that moves, and the gain."""
    cells = []
    for row in rows:
        cells.append(
            [
                row["name"],
                f"{row['larger']:.2f}x",
                *(_way(row[key]) for key in ("without", "with")),
                f"{row['without'][1] / row['with'][1]:.2f}x"
                if row["without"] and row["with"]
                else "",
            ]
        )
    headers = ["", "2 samples over 1, a sample", "without BPipe", "with it", "gain"]
    gains = {
        row["name"]: row["without"][1] / row["with"][1]
        for row in rows
        if row["without"] and row["with"]
    }
    pays = [name for name, gain in gains.items() if gain >= 1.01]
    return (
        f"{table(headers, cells)}\n\nIt buys something in {len(pays)} of {len(rows)} cases: "
        f"{'; '.join(pays) or 'none'}."
    )


def _way(way: tuple[str, float, bool] | None) -> str:
    return "nothing fits" if way is None else f"{way[0]}: {1e3 * way[1]:.0f} ms"
