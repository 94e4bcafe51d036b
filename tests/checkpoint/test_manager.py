"""A run's checkpoints: the last and the best are kept, and a restart continues from the last."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.checkpoint import (
    CheckpointManager,
    export_safetensors,
    read_checkpoint,
    reading,
)
from autosplit.errors import CheckpointError
from autosplit.pipeline import PipelineTrainer, StageOptions
from autosplit.planner import Partition, captured_model
from autosplit.stage import Stage
from benchmarks.startup.restart import counted

BATCH = torch.ones(4, 8), torch.zeros(4, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 8))


def trainer(planning: dict[str, Any] | None = None) -> PipelineTrainer:
    return PipelineTrainer(
        model(),
        nn.functional.mse_loss,
        torch.optim.AdamW,
        stages=2,
        example=torch.ones(2, 8),
        microbatches=2,
        ranks=1,
        stage_options=StageOptions(planning=planning or {"costs": "estimate"}),
    )


def trained(manager: CheckpointManager, steps: int, scores: dict[int, float]) -> list[Tensor]:
    """Losses of the steps up to ``steps``, resumed from the run's last checkpoint."""
    with counted(reading, "read_metadata") as opened, ExitStack() as stack:
        engine = stack.enter_context(trainer(manager.planning(stages=2)))
        start = manager.resume(engine)
        stack = stack.pop_all()
    assert opened.call_count == min(start, 1)  # once for the plan and the state
    losses = []
    with stack:
        for step in range(start + 1, steps + 1):
            losses.append(engine.step(BATCH))
            manager.save(engine, step=step, score=scores.get(step))
    return losses


def test_the_last_and_the_best_are_kept_and_a_restart_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(CheckpointManager(tmp_path / "whole", keep=1), 4, {})
    manager = CheckpointManager(tmp_path / "run", keep=2)
    assert (manager.latest, manager.best, manager.planning(stages=2)) == (None, None, None)
    losses = trained(manager, 3, {1: 0.25, 2: 0.5, 3: 0.75})
    assert manager.steps == [1, 2, 3]
    (tmp_path / "run" / "step-00000009").mkdir()  # of a save that was killed
    monkeypatch.setattr("autosplit.planner.cutting.estimate", None)  # a restart measures nothing
    with (
        counted(captured_model, "capture_forward") as whole_captures,
        counted(Partition, "__init__") as cuts,
        counted(Stage, "__init__") as stages,
    ):
        losses += trained(manager, 4, {4: 1.0})
    counts = [counter.call_count for counter in (whole_captures, cuts, stages)]
    assert counts == [1, 1, 2]  # no block is captured to be timed
    assert torch.equal(torch.stack(losses), torch.stack(whole))
    assert manager.steps == [1, 3, 4]
    assert manager.best == tmp_path / "run" / "step-00000001"
    assert manager.planning(stages=2) != manager.planning(stages=3)


def test_garbage_is_collected_once_a_checkpoint_is_read(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    trained(manager, 1, {})
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(50)
    try:
        reading.open_checkpoint(manager.latest or "")
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert generations == [0, 1]


def test_a_restart_continues_the_schedule_of_learning_rates(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    with trainer() as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2)
        for _ in range(3):
            engine.step(BATCH)
            scheduler.step()
        manager.save(engine, step=3, scheduler=scheduler)
        expected = scheduler.state_dict(), engine.optimizer.param_groups[0]["lr"]
    with trainer() as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2)
        assert manager.resume(engine, scheduler=scheduler) == 3
        assert (scheduler.state_dict(), engine.optimizer.param_groups[0]["lr"]) == expected


def test_other_files_are_not_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1, keep_best=0)
    with trainer() as engine:
        for step in (1, 2, 3):
            manager.save(engine, step=step)
            (tmp_path / f"step-{step:08d}" / "notes.txt").touch()
            if step == 2:
                (tmp_path / "step-00000002" / "notes.txt").unlink()
    assert manager.steps == [1, 3]


def test_the_best_score_may_be_the_largest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1, best="max")
    with trainer() as engine:
        for step, score in enumerate((0.5, 0.75, 0.25), 1):
            manager.save(engine, step=step, score=score)
    assert manager.best == tmp_path / "step-00000002"
    assert manager.steps == [2, 3]


def test_bad_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got keep=0, keep_best=1, best='min'"):
        CheckpointManager(tmp_path, keep=0)


def test_safetensors_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    from safetensors.torch import load_file

    manager = CheckpointManager(tmp_path / "run")
    with trainer() as engine:
        manager.save(engine, step=1)
    assert manager.latest is not None
    export_safetensors(manager.latest, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    export_safetensors(manager.latest, tmp_path / "parts", max_shard_size=300)
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    saved = read_checkpoint(manager.latest)
    assert written.keys() == saved.keys() == model().state_dict().keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in written.items())


def test_asynchronous_saves_remove_old_ones_too(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    with trainer() as engine:
        for step in (1, 2, 3):
            manager.save(engine, step=step, asynchronous=True)
    assert manager.steps == [2, 3]  # the second was the last one that was written when 3 began
