"""A small language model on two ranks: steps over drawn lists, each way in turn."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.pipeline import PipelineTrainer, RunOptions, launch
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.size_costs import fit_terms, seconds_of_size

from ..results import Rows, Target, ratios, table
from .contenders import FOUND, IN_ORDER, PADDED, SORTED, WAYS
from .lengths import draw
from .settings import Settings

RANKS, VOCABULARY, BLOCKS, HEADS = 2, 512, 3, 4
SETTLING = 4  # steps, of which "auto" measures some
RATIO = Target("measured / simulated", at_most=1.05)


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.heads, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0)
        query, key, value = heads.transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(-3, -2).flatten(-2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return y


def stage(index: int, width: int) -> nn.Module:
    """The first or the second half of the model."""
    blocks = [Block(width) for _ in range(BLOCKS)]
    if index == 0:
        return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks)
    return nn.Sequential(*blocks, nn.Linear(width, VOCABULARY))


def listed(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Microbatches of one text each, the same on all ranks."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [torch.randint(VOCABULARY, (1, n + 1), generator=generator) for n in lengths]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def as_run(way: str, lengths: Sequence[int]) -> list[int]:
    """The lengths in the order and size in which a way runs them."""
    if way == SORTED:
        return sorted(lengths)
    return [max(lengths)] * len(lengths) if way == PADDED else [*lengths]


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each number of microbatches: seconds of each way, list by list, and of the
    simulated steps of the found order.
    """
    for count in settings.engine_counts:
        arguments = count, settings.width, settings.lists
        first, *others = launch(_on_rank, RANKS, arguments, timeout=3600.0, threads=1)
        seconds = {way: [*map(max, *(rank[way] for rank in (first, *others)))] for way in WAYS}
        yield {
            "name": f"{count} microbatches",
            "seconds": seconds,
            "makespans": first["makespans"],
            "simulated": first["simulated"],
        }


def _on_rank(count: int, width: int, lists: int) -> dict[str, list[float]]:
    source = random.Random(count)
    trainers = {way: _trainer(count, width, way) for way in WAYS}
    results = defaultdict[str, list[float]](list)
    steps = []
    for step in range(SETTLING + lists):
        lengths = draw(source, count)
        for way, trainer in trainers.items():
            microbatches = listed(as_run(way, lengths))
            dist.barrier()
            start = time.perf_counter()
            trainer.step(microbatches=microbatches)
            if step >= SETTLING:
                results[way].append(time.perf_counter() - start)
        if step >= SETTLING:
            found = trainers[FOUND]
            steps.append((found.schedule, found.timeline(), lengths))
    results["makespans"] = [timeline.makespan for _, timeline, _ in steps]
    results["simulated"] = _simulated(steps)
    for trainer in trainers.values():
        trainer.close()
    return dict(results)


def _simulated(steps: Sequence[Any]) -> list[float]:
    """Each step by seconds that are fitted to all actions of all steps."""
    points = defaultdict[tuple[int, ActionKind], list[tuple[float, float]]](list)
    for _, timeline, lengths in steps:
        for span in timeline.spans:
            point = float(lengths[span.action.microbatch]), span.end - span.start
            points[span.action.stage, span.action.kind].append(point)
    terms = {key: fit_terms(of_key) for key, of_key in points.items()}

    def duration(lengths: Sequence[int]) -> Callable[[Action], float]:
        return lambda a: seconds_of_size(terms[a.stage, a.kind], lengths[a.microbatch])

    return [simulate(schedule, duration(lengths)).makespan for schedule, _, lengths in steps]


def _trainer(count: int, width: int, way: str) -> PipelineTrainer:
    return PipelineTrainer(
        lambda index: stage(index, width),
        lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        stages=RANKS,
        microbatches=count,
        schedule="auto" if way == FOUND else "zb-h1",
        run_options=RunOptions(timeout=300.0, record=way == FOUND),
    )


def render(rows: Rows) -> str:
    """Milliseconds of a step of each way, and the found order over the others."""
    cells = []
    for row in rows:
        seconds = row["seconds"]
        over = [
            f"{median(ratios(seconds[FOUND], seconds[way])):.3f}"
            for way in (IN_ORDER, SORTED, PADDED)
        ]
        simulated = median(ratios(row["makespans"], row["simulated"]))
        steps = [f"{1e3 * median(seconds[way]):.0f}" for way in WAYS]
        cells.append([row["name"], *steps, *over, RATIO.cell(simulated)])
    headers = ["", *(f"{way}, ms" for way in WAYS), "found / in order", "found / sorted"]
    return table([*headers, "found / padded", RATIO.title], cells)
