"""A resumed run goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from autosplit import CheckpointError
from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.pipeline import PipelineTrainer, StageOptions
from tests.checkpoint import checkpoint_workers
from tests.checkpoint.checkpoint_workers import batch, trainer, whole


def ramp(optimizer: Any) -> lr_scheduler.LRScheduler:
    """One scheduler behind another, as people have them."""
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    then = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[2])


def by_group(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def steps(engine: PipelineTrainer, scheduler: Any, first: int, last: int) -> torch.Tensor:
    losses = []
    for step in range(first, last):
        losses.append(engine.step(batch(step)))
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0 + step)
        else:
            scheduler.step()
    return torch.stack(losses)


def test_checkpoints_of_others_leave_generators_alone(tmp_path: Path) -> None:
    torch.save(whole(3).state_dict(), tmp_path / "x.pt")
    with trainer(whole(0), 2, ranks=1) as engine:
        torch.manual_seed(6)
        loaded = load_checkpoint(engine, tmp_path / "x.pt")
        assert (loaded.step, loaded.extra, loaded.generators) == (None, {}, "untouched")
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.manual_seed(6)))
        with pytest.raises(CheckpointError, match="has no state of a scheduler: leave out"):
            load_checkpoint(engine, tmp_path / "x.pt", scheduler=ramp(engine.optimizer))


def test_a_scheduler_does_not_go_on_over_other_groups(tmp_path: Path) -> None:
    """Its lists have an element for each group, which would go to another one's parameters."""

    def turned(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = reversed(checkpoint_workers.adam(parameters).param_groups)
        return torch.optim.AdamW([{"params": g["params"], "lr": g["lr"]} for g in groups])

    def in_more(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p]} for p in parameters])

    with trainer(whole(0), 2, ranks=1) as engine:
        scheduler = by_group(engine.optimizer)
        steps(engine, scheduler, 0, 3)
        save_checkpoint(engine, tmp_path, scheduler=scheduler)
        expected = steps(engine, scheduler, 3, 6)
    for other in (turned, in_more):
        with trainer(whole(0), 2, ranks=1, optimizer_fn=other) as engine:
            scheduler = by_group(engine.optimizer)
            with pytest.raises(CheckpointError, match="or has other groups of parameters"):
                load_checkpoint(engine, tmp_path, scheduler=scheduler)
    with trainer(whole(0), 3, ranks=1) as engine:  # the same groups in another cut
        scheduler = by_group(engine.optimizer)
        load_checkpoint(engine, tmp_path, scheduler=scheduler)
        assert torch.equal(steps(engine, scheduler, 3, 6), expected)


def test_numpys_numbers_can_be_read_back(tmp_path: Path) -> None:
    """Rates that a function of numpy's gives are some, and so is the optimizer's then."""
    numpy = pytest.importorskip("numpy")

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=numpy.float64(0.01), eps=numpy.float32(1e-8))

    def cosine(optimizer: Any) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step / 9))

    with trainer(whole(0), 2, ranks=1, optimizer_fn=build) as engine:
        scheduler = cosine(engine.optimizer)
        steps(engine, scheduler, 0, 2)
        extra = {"best": numpy.float32(0.5), "at": numpy.int64(3)}
        save_checkpoint(engine, tmp_path, scheduler=scheduler, extra=extra)
        expected = steps(engine, scheduler, 2, 4)
    with trainer(whole(1), 2, ranks=1, optimizer_fn=build) as engine:
        scheduler = cosine(engine.optimizer)
        loaded = load_checkpoint(engine, tmp_path, scheduler=scheduler, optimizer=True)
        assert loaded.extra == {"best": 0.5, "at": 3}
        assert torch.equal(steps(engine, scheduler, 2, 4), expected)


@pytest.mark.parametrize("given", [{"step": "5"}, {"extra": 5}])
def test_a_step_is_a_number_and_extra_a_dictionary(given: Any, tmp_path: Path) -> None:
    with (
        trainer(whole(0), 2, ranks=1) as engine,
        pytest.raises(CheckpointError, match=r"^step= must be an integer or None, and extra= a"),
    ):
        save_checkpoint(engine, tmp_path, **given)


def cut_at(block: str) -> PipelineTrainer:
    """A model that its trainer cuts there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 4))
    planning: Any = {"costs": "estimate", "cut_at": [block]}
    return PipelineTrainer(
        model,
        nn.functional.mse_loss,
        torch.optim.AdamW,
        stages=2,
        microbatches=2,
        ranks=1,
        example=(torch.ones(2, 4),),
        stage_options=StageOptions(planning=planning),
    )


def test_generators_go_on_in_the_same_stages_only(tmp_path: Path) -> None:
    """Cut at another layer, another stage draws: that is said, also where that has no tensors."""
    with cut_at("2") as engine:
        save_checkpoint(engine, tmp_path)
    for block, expected in (("2", "continued"), ("1", "seeded"), ("3", "seeded")):
        with cut_at(block) as engine:
            assert load_checkpoint(engine, tmp_path).generators == expected


def test_an_optimizer_that_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters, "kind": nn.Linear(1, 1)}], lr=0.1)

    with (
        trainer(whole(0), 2, ranks=1, optimizer_fn=build) as engine,
        pytest.raises(
            CheckpointError, match="the optimizer's kind is a Linear; a checkpoint can have tensors"
        ),
    ):
        save_checkpoint(engine, tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_gradients_that_wait_for_a_step_are_neither_saved_nor_kept(tmp_path: Path) -> None:
    with trainer(whole(0), 2, ranks=1) as engine:
        save_checkpoint(engine, tmp_path / "before")
        expected = [engine.step(batch(at)) for at in range(2)]
        engine.forward_backward(batch(2))
        with pytest.raises(CheckpointError, match=r"that no step has used.* after step"):
            save_checkpoint(engine, tmp_path / "between")
        load_checkpoint(engine, tmp_path / "before")
        again = [engine.step(batch(at)) for at in range(2)]
    assert torch.equal(torch.stack(expected), torch.stack(again))
