"""What a step of each schedule allocates on the fullest rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.launch import launch
from autosplit.trainer.trainer import PipelineTrainer
from examples.decoder import Block, LlamaConfig, Rotary

from ..peak import peak_bytes
from ..results import Rows, table
from .turns import forget

BASELINE = "1f1b, fused"
CONFIG = LlamaConfig(dim=128, heads=2, kv_heads=2, hidden=352, seq=64)
LAYERS = 2  # on each rank
RANKS = (4, 8)

# Of the activations of fused 1F1B's first rank, for P ranks; see each schedule's docstring.
FORMULAS: dict[str, Callable[[int], float]] = {
    BASELINE: lambda ranks: 1.0,
    "zb-h1": lambda ranks: 1.0,
    "zb-h2": lambda ranks: (2 * ranks - 1) / ranks,
    "zb-v": lambda ranks: 1.0,
    "v-half": lambda ranks: (ranks // 2 + 1) / ranks,
    "v-min": lambda ranks: math.ceil((ranks + 2) / 3) / ranks,
}


class Layers(nn.Module):
    """Like blocks of the decoder and nothing else, so that every stage keeps the same."""

    def __init__(self, config: LlamaConfig, count: int) -> None:
        super().__init__()
        self.rotary = Rotary(config.dim // config.heads, config.seq, config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return x


def schedules(ranks: int) -> Iterator[Schedule]:
    """Those with a formula, for M = 2P."""
    for name in FORMULAS:
        family = name.removesuffix(", fused")
        stages = ranks * (SCHEDULES[family].chunks or 1)
        built = build(family, stages, 2 * ranks, ranks=ranks, split_backward=family == name)
        yield dataclasses.replace(built, name=name, crosses_step=False)


def measure_all() -> Iterator[dict[str, Any]]:
    for ranks in RANKS:
        yield from measure([*schedules(ranks)], CONFIG)


def measure(cases: Sequence[Schedule], config: LlamaConfig) -> Rows:
    """One step of each case on as many processes as it has ranks; all must have the same."""
    (ranks,) = {len(case.ranks) for case in cases}
    found = launch(_on_rank, ranks, (cases, config), timeout=600.0)
    return [
        {
            "name": f"{ranks} ranks: {case.name}",
            "ranks": ranks,
            "schedule": case.name,
            "allocated": max(peaks),
        }
        for case, *peaks in zip(cases, *found, strict=True)
    ]


def _on_rank(cases: Sequence[Schedule], config: LlamaConfig) -> list[int]:
    return [_run(case, config) for case in cases]


def _run(schedule: Schedule, config: LlamaConfig) -> int:
    layers = LAYERS * dist.get_world_size() // schedule.stages
    x = torch.randn(schedule.microbatches, config.seq, config.dim)
    batch = (x, x[:, 0, 0].clone())
    with PipelineTrainer(
        lambda index: Layers(config, layers),
        lambda output, target: output.sum(),
        torch.optim.SGD,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        schedule=schedule,
    ) as trainer:

        def step() -> None:
            trainer.forward_backward(batch)
            forget(trainer.modules.values())

        step()
        return peak_bytes(step)


def render(rows: Rows) -> str:
    base = {row["ranks"]: row["allocated"] for row in rows if row["schedule"] == BASELINE}
    cells = [
        [
            str(row["ranks"]),
            row["schedule"],
            f"{row['allocated'] / 2**20:.2f}",
            f"{row['allocated'] / base[row['ranks']]:.3f}x",
            f"{FORMULAS[row['schedule']](row['ranks']):.3f}x",
        ]
        for row in rows
    ]
    headers = ["ranks", "schedule", "allocated MiB", "over fused 1F1B", "formula"]
    return table(headers, cells)
