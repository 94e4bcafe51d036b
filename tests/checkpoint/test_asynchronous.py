"""Saves that go on while the trainer trains."""

from __future__ import annotations

import threading
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from autosplit import CheckpointError
from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint, saving
from tests.checkpoint.checkpoint_workers import named, train, trainer, whole


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before this is set."""
    go = threading.Event()
    write = saving.save

    def late(*arguments: Any, **options: Any) -> None:
        assert go.wait(30)
        write(*arguments, **options)

    monkeypatch.setattr(saving, "save", late)
    return go


def test_an_asynchronous_save_excludes_later_steps(
    tmp_path: Path, release: threading.Event
) -> None:
    with trainer(whole(), 2, ranks=1) as engine:
        train(engine, 0, 1)
        earlier = named(engine)
        pending = save_checkpoint(engine, tmp_path / "it", asynchronous=True)
        losses = train(engine, 1, 3)
        assert pending is not None
        assert not pending.done
        release.set()
        pending.wait()
        assert pending.done
    read = read_checkpoint(tmp_path / "it")
    assert all(torch.equal(value, earlier[name]) for name, value in read.items())
    with trainer(whole(1), 2, ranks=1) as engine:
        load_checkpoint(engine, tmp_path / "it", optimizer=True)
        assert torch.equal(train(engine, 1, 3), losses)


def test_the_next_save_waits(tmp_path: Path, release: threading.Event) -> None:
    with trainer(whole(), 2, ranks=1) as engine:
        save_checkpoint(engine, tmp_path / "it", step=1, asynchronous=True)
        release.set()
        assert save_checkpoint(engine, tmp_path / "it", step=2) is None
        assert load_checkpoint(engine, tmp_path / "it").step == 2


def test_a_save_that_fails_says_so_once_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CheckpointException("write", {0: (OSError("no space left"), StackSummary())})

    with trainer(whole(), 2, ranks=1) as engine:
        save_checkpoint(engine, tmp_path / "it", step=1)
        monkeypatch.setattr(saving, "save", full)
        pending = save_checkpoint(engine, tmp_path / "it", step=2, asynchronous=True)
        assert pending is not None
        with pytest.raises(CheckpointError, match="no space left"):
            pending.wait()
        train(engine, 0, 1)  # the trainer goes on
        assert load_checkpoint(engine, tmp_path / "it").step == 1
        save_checkpoint(engine, tmp_path / "it", step=3, asynchronous=True)
        with pytest.raises(CheckpointError, match="no space left"):
            engine.close()
