"""Metrics of the last stage's outputs: the same numbers on all ranks, those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError
from tests.pipeline.training.metric_workers import data, hits, measured, stages, trainer
from tests.ranks import Ranks


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_all_ranks_have_the_metrics_of_every_microbatch(on_ranks: Ranks, schedule: str) -> None:
    """Under two copies of the stages, two ranks have half of the microbatches each."""
    model = nn.Sequential(*stages(2)).eval()
    inputs, targets = data(12)
    parts = zip(inputs.chunk(4), targets.chunk(4), strict=True)
    with torch.no_grad():
        expected = [int(hits(model(x), y)["correct"]) for x, y in parts]
    assert len(set(expected)) > 1
    first, second = on_ranks(measured, 2, (schedule,), timeout=60)
    for found in (first, second):
        assert found["before"]["correct"].tolist() == expected
        assert found["before"]["samples"].tolist() == [3.0] * 4
        assert list(found["before"]) == ["loss", "correct", "samples"]
        assert torch.equal(found["after"]["loss"], found["losses"])
        assert not torch.equal(found["after"]["loss"], found["before"]["loss"])


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
