"""Metrics of the last stage's outputs: the same numbers on all ranks, those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped
from tests.ranks import ranks

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


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
@ranks(2)
def test_all_ranks_have_the_metrics_of_every_microbatch(schedule: str) -> None:
    """Under two copies of the stages, two ranks have half of the microbatches each. A step in
    between is not seen.
    """
    model = nn.Sequential(*stages(2)).eval()
    inputs, targets = batch = data(12)
    parts = zip(inputs.chunk(4), targets.chunk(4), strict=True)
    with torch.no_grad():
        expected = [int(hits(model(x), y)["correct"]) for x, y in parts]
    assert len(set(expected)) > 1
    with trainer(2, schedule=schedule) as engine:
        before = engine.measure(batch, hits)
        engine.step(batch)
        after = engine.measure(batch, hits)["loss"]
        assert torch.equal(after, engine.evaluate(batch))
    assert before["correct"].tolist() == expected
    assert before["samples"].tolist() == [3.0] * 4
    assert list(before) == ["loss", "correct", "samples"]
    assert not torch.equal(after, before["loss"])


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ([1, 2], r"dictionary of numbers, .*got a list"),
        ({"rows": torch.ones(3)}, r"Tensor of shape \[3\] as 'rows'; .*reduce it"),
        ({"name": "a"}, r"gave a str as 'name'; expected a number"),
    ],
)
def test_what_is_no_number_is_refused(gives: Any, said: str) -> None:
    engine = trainer(2, ranks=1)
    with pytest.raises(PipelineError, match=said):
        engine.measure(data(12), lambda output, targets: gives)


def test_other_names_for_a_microbatch_are_refused() -> None:
    seen: list[int] = []

    def changing(output: Any, targets: Any) -> dict[str, int]:
        seen.append(0)
        return {"a": 1} if len(seen) < 3 else {"b": 1}

    engine = trainer(2, ranks=1)
    with pytest.raises(PipelineError, match=r"gave a for microbatch 0 and b for microbatch 2"):
        engine.measure(data(12), changing)
