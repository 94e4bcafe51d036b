"""How much of the reduction of two replicas of a Llama its W hides, over links that take time."""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from autosplit.mesh.costs import Link
from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.reductions import Reductions
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.training import replicas as model_replicas
from autosplit.stage import Stage

from ..results import Rows
from .throttled_link import Throttled

_CAP = 2**20  # bytes of a bucket
_MICROBATCHES, _LENGTH, _WORDS = 4, 256, 512

Times = dict[tuple[ActionKind, int], float]
"""Seconds by kind and microbatch."""


class Logits(nn.Module):
    """A Llama that is given words and returns logits."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=4,
                num_attention_heads=4,
                vocab_size=_WORDS,
                use_cache=False,
            )
        )

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=words).logits
        return logits


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def measure(steps: int, only: str = "") -> Iterator[dict[str, Any]]:
    """A row for whole Ws and one for slices, over two links each, on two ranks."""
    cases = [
        (slices, reduction)
        for slices in (1, 8)
        for reduction in (0.5, 1.0)
        if only in _name(slices, reduction)
    ]
    yield from launch(on_rank, 2, (cases, steps), timeout=900)[0]


def _name(slices: int, reduction: float) -> str:
    return f"{'whole' if slices == 1 else f'{slices} slices'}, reduction {reduction:g} W"


def on_rank(cases: list[tuple[int, float]], steps: int) -> Rows:
    rows = []
    for slices, reduction in cases:
        with mock.patch.object(model_replicas, "CAP", _CAP), _trainer(slices) as trainer:
            rows.append(_row(trainer, slices, reduction, steps))
    return rows


def _trainer(slices: int) -> PipelineTrainer:
    return PipelineTrainer(
        Logits,
        loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        stages=1,
        microbatches=_MICROBATCHES,
        schedule="1f1b",
        mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",)),
        stage_options=StageOptions(
            stage_factory=functools.partial(Stage, slices=slices, late_input=True)
        ),
        run_options=RunOptions(record=True),
    )


def _row(trainer: PipelineTrainer, slices: int, reduction: float, steps: int) -> dict[str, Any]:
    words = torch.randint(_WORDS, (_MICROBATCHES, _LENGTH))
    for _ in range(2):
        trainer.step((words, words))
    times = _times(trainer, (words, words), steps)
    weights = [each for (kind, _), each in times.items() if kind is ActionKind.BACKWARD_WEIGHT]
    bytes_ = sum(p.nbytes for p in trainer.modules[0].parameters())
    link = Link(0.0, bytes_ / (reduction * statistics.median(weights)))
    hidden, seconds = [], []
    with Throttled(link):
        trainer.step((words, words))
        for _ in range(steps):
            trainer.step((words, words))
            timeline = trainer.timeline()
            hidden.append(timeline.reduction_hidden or 0.0)
            seconds.append(timeline.makespan)
    reductions = Reductions([bytes_], link, cap=_CAP, slices=slices)

    def taken(action: Action) -> float:
        return times[action.kind, action.microbatch]

    simulated = simulate(trainer.schedule, taken, reductions=reductions)
    return {
        "name": _name(slices, reduction),
        "schedule": "1f1b",
        "slices": slices,
        "reduction": reduction,
        "hidden": statistics.median(hidden),
        "hidden_simulated": simulated.reduction_hidden,
        "measured": statistics.median(seconds),
        "simulated": simulated.makespan,
        "without": simulate(trainer.schedule, taken).makespan,
    }


def _times(trainer: PipelineTrainer, batch: tuple[Tensor, Tensor], steps: int) -> Times:
    """Medians of what actions took, over a link that is as fast as it is."""
    found = defaultdict(list)
    for _ in range(steps):
        trainer.step(batch)
        mine: Times = defaultdict(float)
        for span in trainer.timeline().spans:
            mine[span.action.kind, span.action.microbatch] += span.end - span.start
        for key, each in mine.items():
            found[key].append(each)
    return {key: statistics.median(each) for key, each in found.items()}
