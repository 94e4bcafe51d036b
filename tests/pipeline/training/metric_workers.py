"""What ranks do in tests of metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autosplit.pipeline import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped

CLASSES = 3


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(count - 1)] + [
        nn.Linear(4, CLASSES)
    ]


def data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return (
        torch.randn(samples, 4, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )


def hits(output: Tensor, targets: Tensor) -> dict[str, Any]:
    return {"correct": (output.argmax(1) == targets).sum(), "samples": len(targets)}


def trainer(count: int, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        stages(count),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches=4,
        **grouped(stage_factory=ReferenceStage, **options),
    )


def measured(schedule: str) -> dict[str, Any]:
    """Before and after a step, which the metric does not see."""
    batch = data(12)
    with trainer(2, schedule=schedule) as engine:
        before = engine.measure(batch, hits)
        engine.step(batch)
        return {
            "before": before,
            "after": engine.measure(batch, hits),
            "losses": engine.evaluate(batch),
        }
