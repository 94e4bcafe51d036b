"""The harness of torch's schedules on the smallest settings; what it finds is not judged here."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

from autosplit import torch_internals
from benchmarks.torch_pipelining import measure as measuring
from benchmarks.torch_pipelining import page
from benchmarks.torch_pipelining.activations import activation_peak
from benchmarks.torch_pipelining.contenders import ENGINE, OURS, TORCH, UNDONATED
from benchmarks.torch_pipelining.measure import Row, Settings, measure
from examples.models import mlp_workload

ON_RANK = measuring._on_rank


def perceptrons(settings: Settings) -> list[Row]:
    """What a rank does, of a model that is traced in a fifth of the time of the benchmark's."""
    workload = mlp_workload(features=8, width=8, layers=4, microbatch_size=2)
    with mock.patch.object(measuring, "call_factory", return_value=workload):
        return ON_RANK(settings)


@pytest.mark.skipif(
    torch_internals.TORCH < (2, 12), reason="torch's stages fail in V-shaped schedules"
)
@pytest.mark.usefixtures("launched_on_ranks")
def test_contenders_take_turns_and_what_a_schedule_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_on_rank", perceptrons)
    settings = Settings(
        schedules=("ZBVZeroBubble", "DualPipeV"),
        microbatches=(2,),
        contenders=(TORCH, UNDONATED, OURS, ENGINE),
        rounds=1,
    )
    result = measure(settings)
    ran = [item for item in result if not item.error]
    assert {item.schedule for item in ran} == {"ZBVZeroBubble"}
    assert [item.contender for item in ran] == [TORCH, OURS, ENGINE]
    assert all(len(item.rounds) == 1 and item.peak > 0 for item in ran)
    text = page.render([{**dataclasses.asdict(item), "settings": "tiny"} for item in result])
    assert "fastest eager over ours, Inductor: at least 1x" in text
    assert f"DualPipeV, M=2: {TORCH}; DualPipeV, M=2: {OURS}" in text
    assert "ValueError: DualPipeV requires at least as many microbatches as stages" in text


def test_gradients_do_not_count_as_activations() -> None:
    module = nn.Linear(100, 100, bias=False)

    def step() -> None:
        kept = torch.empty(50_000)
        module.weight.grad = torch.empty(100, 100)
        more = torch.empty(30_000)  # a gradient that is only added
        del kept
        torch.empty(60_000)
        del more

    assert activation_peak(step, [module]) == 4 * 90_000
