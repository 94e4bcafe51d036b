"""Rehearsals: real steps of chosen stages, that leave the model as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError
from autosplit.pipeline import build
from autosplit.pipeline.training.stage_trainer import StageTrainer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.profile import BlockOptions
from autosplit.planner.trial import TrialRun, can_run_trial, run_trial, trial_steps
from tests.planner.planned_models import loss, net, tokens

PLANNED = [(1.0, 0.0, 2.0), (1.0, 1.0, 1.0)]


class Noisy(nn.Module):
    """State that a step would change: statistics, and numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)), 0.5, self.training))


def _rehearsed(
    model: nn.Module, x: torch.Tensor, options: BlockOptions | None = None, *, split: bool = True
) -> TrialRun:
    whole = WholeModel.capture(model, x)
    schedule = build("1f1b", 2, 2, ranks=1, split_backward=split)
    assert can_run_trial(whole, schedule)
    return run_trial(whole, [1], schedule, options or BlockOptions(), planned=PLANNED, seconds=0.01)


def test_a_rehearsal_leaves_the_model_as_it_is() -> None:
    model = Noisy()
    weight, mean = model.first.weight, model.norm.running_mean
    before = torch.get_rng_state()
    seen = _rehearsed(
        model,
        torch.randn(4, 8, generator=torch.Generator(torch.get_default_device()).manual_seed(0)),
    )
    assert torch.equal(before, torch.get_rng_state())
    assert model.first.weight is weight
    assert all(p.grad is None for p in model.parameters())
    assert model.norm.running_mean is mean
    assert torch.equal(model.norm.running_mean, torch.zeros(8))
    assert model.norm.num_batches_tracked == 0
    assert min(times[0] for times in seen.times) > 0.0
    assert seen.step > 2 * sum(times[0] for times in seen.times)


def test_parameters_on_meta_are_made_for_the_rehearsal() -> None:
    with torch.device("meta"):
        model = Noisy()
    assert _rehearsed(model, torch.randn(4, 8)).step > 0.0
    assert model.first.weight.is_meta


def test_the_loss_and_its_targets_are_run() -> None:
    whole = BlockOptions(loss_fn=loss, targets=tokens())
    assert _rehearsed(net(), tokens(), whole).step > 0.0
    short = BlockOptions(loss_fn=loss, targets=tokens()[:, 1:])
    with pytest.raises(PipelineError, match="batch_size"):
        _rehearsed(net(), tokens(), short)


def test_each_step_has_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training: what was read in the step before is in no cache."""
    batches: list[torch.Tensor] = []

    def trained(self: StageTrainer, batch: Any) -> torch.Tensor:
        batches.append(batch[0][0])
        assert all(p.grad is None for m in self.modules.values() for p in m.parameters())
        return run(self, batch)

    run = StageTrainer.forward_backward
    monkeypatch.setattr(StageTrainer, "forward_backward", trained)
    whole = WholeModel.capture(net(), tokens())
    with trial_steps(whole, [1], build("1f1b", 2, 2, ranks=1), BlockOptions()) as step:
        warm = len(batches)
        seconds, spans = step()
    assert len(batches) == warm + 1 > 1
    assert len({batch.data_ptr() for batch in batches}) == len(batches)
    assert seconds > 0.0
    assert {span.action.stage for span in spans} == {0, 1}


def test_full_backwards_are_shared_out_as_planned() -> None:
    seen = _rehearsed(net(), tokens(), split=False)
    assert seen.times[0][1] == 0.0 < seen.times[0][2]
    assert seen.times[1][1] == pytest.approx(seen.times[1][2])


def test_what_cannot_be_run_here_is_not_rehearsed() -> None:
    whole = WholeModel.capture(net(), tokens())
    assert not can_run_trial(whole, build("1f1b", 2, 2))  # two ranks, and one process
