"""The peak of every rank as it was predicted, over what the allocator saw, on two real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions
from autosplit.ranks.launch import launch
from examples.families import FAMILIES

from ..paper.settings import SIZES
from ..results import Rows, Target, table, verdicts
from .settings import Settings

RANKS = 2
CASES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "split_backward": False},
    {"schedule": "1f1b"},
    {"schedule": "zb-h1", "memory": "lean"},
    {"schedule": "gpipe"},
)
OFF = Target("predicted - measured", at_most=0.05, style=".1%")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and case."""
    for family in settings.families:
        args = (family, SIZES[settings.size][family], settings.microbatches[-1], CASES)
        yield from launch(_on_rank, RANKS, args, timeout=1200.0)[0]


def _named(family: str, case: dict[str, Any]) -> str:
    words = [case["schedule"], case.get("memory", "")]
    words.append("" if case.get("split_backward", True) else "fused")
    return ", ".join([family, *filter(None, words)])


def _on_rank(
    family: str,
    overrides: Mapping[str, object],
    microbatches: int,
    cases: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [_run(family, overrides, microbatches, case) for case in cases]


def _run(
    family: str, overrides: Mapping[str, object], microbatches: int, case: dict[str, Any]
) -> dict[str, Any]:
    subject = FAMILIES[family](**overrides)
    batch = subject.batch_fn(0, microbatches * subject.microbatch_size)
    with PipelineTrainer(
        subject.build(),
        subject.loss_fn,
        torch.optim.AdamW,
        microbatches=microbatches,
        stages=RANKS,
        example=subject.example(),
        schedule=case["schedule"],
        stage_options=StageOptions(
            planning={"costs": "estimate"}, memory=case.get("memory", "balanced")
        ),
        run_options=RunOptions(timeout=300.0, split_backward=case.get("split_backward", True)),
    ) as trainer:
        early = trainer.predict_memory(batch).predicted
        trainer.step(batch)
        trainer.record = "memory"
        trainer.step(batch)
        found = trainer.memory()
    highest = [max(bands, key=lambda each: each.activations) for bands in found.bands]
    return {
        "name": _named(family, case),
        "measured": found.peak_activations,
        "predicted": [_known(each) for each in early],
        "fixed": found.fixed,
        "during": [band.during for band in highest],
    }


def _known(predicted: int | None) -> int:
    if predicted is None:
        raise PipelineError("expected stages of autosplit.Stage, of which all is known")
    return predicted


def render(rows: Rows) -> str:
    """A row a case, with the rank where the prediction is farthest off."""
    cells, off = [], {}
    for row in rows:
        pairs = zip(row["predicted"], row["measured"], strict=True)
        ratios = [predicted / measured for predicted, measured in pairs]
        off[row["name"]] = max(abs(each - 1.0) for each in ratios)
        cells.append(
            [
                row["name"],
                " / ".join(f"{each / 2**20:.1f}" for each in row["measured"]),
                " / ".join(each or "between" for each in row["during"]),
                " / ".join(f"{each:.3f}" for each in ratios),
                OFF.cell(off[row["name"]]),
            ]
        )
    headers = ["", "activations MiB by rank", "highest in", "predicted / measured"]
    return f"{table([*headers, OFF.title], cells)}\n\n{verdicts([(OFF, off)])}"
