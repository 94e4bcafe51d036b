"""The same training with and without split: the losses are the same, and they fall."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions, launch
from examples.families import FAMILIES

from ...results import Rows, table
from ..settings import Settings

RANKS = 2
MICROBATCHES = 4
TOLERANCE = 1e-4
"""The largest difference of losses that counts as rounding, over 200 steps of AdamW."""

SIZES: Mapping[str, Mapping[str, object]] = {
    "llama": {"width": 64, "heads": 2, "hidden": 176, "seq": 64, "microbatch_size": 4},
    "bert": {"width": 64, "heads": 2, "hidden": 256, "seq": 64, "microbatch_size": 8},
    "mamba": {"width": 64, "seq": 12, "layers": 2, "microbatch_size": 16},
    "resnet": {"depths": "1,1,1,1", "width": 8, "image": 32, "microbatch_size": 8},
}


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family."""
    for family in settings.families:
        tiny = settings.overrides(family) if settings.size == "tiny" else SIZES[family]
        args = (family, tiny, settings.training_steps)
        fused, split = launch(train_both, RANKS, args, timeout=900.0)[0]
        yield {"name": family, "fused": fused, "split": split}


def train_both(
    family: str, overrides: Mapping[str, object], steps: int
) -> tuple[list[float], list[float]]:
    """On each rank: the losses of both trainings, step by step."""
    return train(family, overrides, steps, split=False), train(family, overrides, steps, split=True)


def train(family: str, overrides: Mapping[str, object], steps: int, *, split: bool) -> list[float]:
    """The mean loss of every step; the same weights, batches and random numbers each time."""
    subject = FAMILIES[family](**overrides)
    torch.manual_seed(0)
    with PipelineTrainer(
        subject.build(),
        subject.loss_fn,
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        stages=RANKS,
        example=subject.example(),
        microbatches=MICROBATCHES,
        stage_options=StageOptions(planning={"costs": "estimate"}),
        run_options=RunOptions(split_backward=split, timeout=120.0),
    ) as trainer:
        size = MICROBATCHES * subject.microbatch_size
        return [trainer.step(subject.batch_fn(step, size)).mean().item() for step in range(steps)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of the trainings of one family.

    Attributes:
        first: mean loss of the first tenth of the steps, fused.
        last: of the last tenth.
        difference: the largest between the losses with and without split.
    """

    first: float
    last: float
    difference: float

    @property
    def same(self) -> bool:
        return self.difference <= TOLERANCE

    @property
    def good(self) -> bool:
        """Whether both learn, alike."""
        return self.same and self.last < self.first


def outcome(row: Mapping[str, Any]) -> Outcome:
    """What a row says."""
    fused, split = row["fused"], row["split"]
    tenth = max(1, len(fused) // 10)
    return Outcome(
        statistics.mean(fused[:tenth]),
        statistics.mean(fused[-tenth:]),
        max(abs(a - b) for a, b in zip(fused, split, strict=True)),
    )


def render(rows: Mapping[str, Rows]) -> str:
    """Losses at the beginning and the end, and how far the two trainings come apart."""
    cells, good = [], []
    for row in rows["training"]:
        fused, split = row["fused"], row["split"]
        found, tenth = outcome(row), max(1, len(fused) // 10)
        good.append(found.good)
        cells.append(
            [
                row["name"],
                str(len(fused)),
                f"{found.first:.3f}",
                f"{found.last:.3f}" if found.last < found.first else f"**{found.last:.3f}**",
                f"{statistics.mean(split[-tenth:]):.3f}",
                f"{found.difference:.1e}" if found.same else f"**{found.difference:.1e}**",
                str(sum(a == b for a, b in zip(fused, split, strict=True))),
            ]
        )
    headers = ["family", "steps", "first", "last, fused", "last, split", "largest difference"]
    text = table([*headers, "steps with the same bits"], cells)
    return f"{text}\n\n{sum(good)} of {len(good)} families learn, alike with and without split."
