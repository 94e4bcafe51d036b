"""A save that fails or is killed leaves the old checkpoint, or has put the new one there."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autosplit import CheckpointError
from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from autosplit.checkpoint.saving import without_single_process_warning
from autosplit.pipeline import PipelineTrainer
from tests.checkpoint.checkpoint_workers import adam, trainer, whole


class Killed(BaseException):
    """Nobody handles it, as nobody handles SIGKILL."""


CHANGING = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")


@contextmanager
def broken_after(
    count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch, *, for_good: bool = True
) -> Iterator[list[str]]:
    """Let ``count`` changes of the file system happen, and not the next one, or none after them;
    gives which those were.
    """
    numbers = itertools.count()
    broken: list[str] = []

    def breaking(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            at = next(numbers)
            if at == count or (for_good and at > count):
                broken.append(name)
                raise error
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in CHANGING:
            patch.setattr(os, name, breaking(name, getattr(os, name)))
        yield broken


def saves(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("save-*"))


def set_all(engine: PipelineTrainer, value: float) -> None:
    with torch.no_grad():
        for module in engine.modules.values():
            for parameter in module.parameters():
                parameter.fill_(value)


def values(path: Path) -> set[float]:
    """Of all parameters, by which an old and a new checkpoint differ."""
    return {item for value in read_checkpoint(path).values() for item in value.unique().tolist()}


def small() -> PipelineTrainer:
    return PipelineTrainer(
        [torch.nn.Linear(2, 2)], torch.nn.functional.mse_loss, adam, microbatches=1, ranks=1
    )


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_whenever_a_save_is_killed_or_fails(
    there: bool, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers see the old checkpoint or the new one, whole; the next save removes leftovers. A save
    may also fail when the new one is complete, while it removes the old one.
    """
    outcomes = []
    for count in itertools.count():
        path, report = tmp_path / str(count) / "it", False
        with small() as engine:
            set_all(engine, 1.0)
            if there:
                save_checkpoint(engine, path)
            set_all(engine, 2.0)
            error = Killed() if killed else OSError(errno.EIO, "Input/output error")
            with broken_after(count, error, monkeypatch, for_good=killed) as broken:
                try:
                    save_checkpoint(engine, path)
                except (Killed, CheckpointError):  # the latter where torch has caught the former
                    report = True
        if there or (path / ".metadata").exists():
            (result,) = values(path)
            state = {"model": {"bias": torch.zeros(2)}}
            with without_single_process_warning():
                load(state, checkpoint_id=path, no_dist=True)
            assert result == state["model"]["bias"][0].item()
            assert report or result == 2.0
            outcomes.append(result)
        with small() as engine:
            set_all(engine, 3.0)
            save_checkpoint(engine, path)
        assert values(path) == {3.0}
        assert len(saves(path)) == 1
        assert [file.name for file in path.parent.iterdir()] == ["it"]
        if not broken:
            break
    assert count > 8
    assert not killed or outcomes == sorted(outcomes)
    assert set(outcomes) == ({1.0, 2.0} if there else {2.0})


def test_a_save_that_did_not_get_to_its_end_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "save-0123456789abcdef").mkdir()
    with pytest.raises(CheckpointError, match="a save was interrupted"):
        read_checkpoint(tmp_path)


def test_folders_of_others_stay_where_a_save_is(tmp_path: Path) -> None:
    """Also where they are called as if a save had left them."""
    notes, torchs = tmp_path / "save-0123456789abcdef", tmp_path / "save-00000000deadbeef"
    with without_single_process_warning():
        save({"model": whole(5).state_dict()}, checkpoint_id=torchs, no_dist=True)
    with small() as engine:
        save_checkpoint(engine, tmp_path / "save-1", step=1)
        for folder in (notes, tmp_path / "save-images"):
            folder.mkdir()
            (folder / "a.txt").write_text("mine")
        earlier = {*tmp_path.rglob("*")}
        for _ in range(2):
            save_checkpoint(engine, tmp_path)
        left = {*tmp_path.rglob("*")} - earlier
        assert earlier <= {*tmp_path.rglob("*")}
        assert len([item for item in left if item.is_dir()]) == 1
        assert load_checkpoint(engine, tmp_path / "save-1").step == 1


def test_it_takes_the_place_of_torchs_own(tmp_path: Path) -> None:
    with without_single_process_warning():
        save({"model": whole(5).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "notes.txt").write_text("mine")
    with trainer(whole(0), 2, ranks=1) as engine:
        load_checkpoint(engine, tmp_path)
        set_all(engine, 1.0)
        save_checkpoint(engine, tmp_path)
    assert read_checkpoint(tmp_path)["1.0.bias"].tolist() == [1.0] * 8
    assert {file.name for file in tmp_path.iterdir()} == {
        ".metadata",
        "notes.txt",
        *saves(tmp_path),
    }


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("mine")
    with (
        trainer(whole(0), 2, ranks=1) as engine,
        pytest.raises(CheckpointError, match=r"Not a directory|exists"),
    ):
        save_checkpoint(engine, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_text() == "mine"
