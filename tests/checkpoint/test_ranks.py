"""Ranks save and load together or not at all."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autosplit import CheckpointError, PipelineError
from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from tests.checkpoint.checkpoint_workers import dropping, named, train, trainer, whole
from tests.checkpoint.forms import state
from tests.checkpoint.test_resume import by_group, steps
from tests.kept_ranks import Ranks, ranks
from tests.mesh.workers import common_folder, same


@ranks(2)
def test_training_goes_on_under_another_number_of_stages() -> None:
    """2 stages, then 4, then 2 again, against 2 all along; and in one process."""
    folder = common_folder()
    with trainer(whole(), 2) as engine:
        expected = train(engine, 0, 6)
        values = named(engine)
    with trainer(whole(), 2) as engine:
        losses = [train(engine, 0, 2)]
        save_checkpoint(engine, folder / "2")
    for stages, first in ((4, 2), (2, 4)):
        with trainer(whole(stages), stages) as engine:
            train(engine, 90, 91)  # so that the optimizer has a state, to be replaced
            load_checkpoint(engine, folder / str(first), optimizer=True)
            losses.append(train(engine, first, first + 2))
            if first == 2:
                save_checkpoint(engine, folder / "4")
    assert same(named(engine), values)
    assert torch.equal(torch.cat(losses), expected)
    with trainer(whole(9), 1, ranks=1) as engine:
        load_checkpoint(engine, folder / "4", optimizer=True)
        assert torch.equal(train(engine, 4, 6), losses[-1])
    # Tied parameters are written under all names, by one rank.
    assert read_checkpoint(folder / "2").keys() == whole().state_dict().keys()
    entries = dcp.FileSystemReader(folder / "2").read_metadata().state_dict_metadata.values()
    assert all(len(getattr(entry, "chunks", [0])) == 1 for entry in entries)


@ranks(2)
def test_a_resumed_run_is_bit_for_bit_the_same_on_as_many_ranks() -> None:
    """Dropout in autosplit's own stages, and a scheduler; and it goes on on one rank."""
    folder, rank = common_folder(), dist.get_rank()
    with trainer(dropping(0), 2, stage_factory=None) as engine:
        torch.manual_seed(10 + rank)  # ranks had one seed while they built the model
        scheduler = by_group(engine.optimizer)
        steps(engine, scheduler, 0, 2)
        save_checkpoint(engine, folder, scheduler=scheduler, step=2)
        expected = steps(engine, scheduler, 2, 4)
        values, drawn = named(engine), torch.rand(3)
    torch.manual_seed(99)
    with trainer(dropping(7), 2, stage_factory=None) as engine:
        scheduler = by_group(engine.optimizer)
        loaded = load_checkpoint(engine, folder, scheduler=scheduler)
        assert torch.equal(steps(engine, scheduler, loaded.step or 0, 4), expected)
        assert same(named(engine), values)
        assert torch.equal(torch.rand(3), drawn)
    with trainer(dropping(5), 3, ranks=1) as engine:
        scheduler = by_group(engine.optimizer)
        loaded = load_checkpoint(engine, folder, scheduler=scheduler)
        assert (loaded.step, loaded.generators) == (2, "seeded")
        assert scheduler.last_epoch == 2
        assert same(named(engine), read_checkpoint(folder))


def refused(said: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=said):
        call(*args, **options)


@ranks(2)
def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    """A failed save keeps the old checkpoint, and a failed load what there is."""
    folder, rank = common_folder(), dist.get_rank()
    it = folder / "it"
    with trainer(dropping(0), 2) as engine:
        train(engine, 0, 1)
        save_checkpoint(engine, it)
        kept = named(engine)
        train(engine, 1, 2)
        earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, earlier[1]))
        refused("^cannot write to.*rank 1: ", save_checkpoint, engine, it)
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
        message = r"^pass the same step on all ranks; the ranks passed \[0, 1\]\nMore: "
        refused(message, save_checkpoint, engine, it, step=rank)
        other = folder / f"of {rank}"
        refused("pass the same folder", save_checkpoint, engine, other)
        load_checkpoint(engine, it)
        assert same(named(engine), kept)
        assert len([*it.glob("save-*")]) == 1
        assert not [*folder.glob(".*")]
        train(engine, 2, 3)
        save_checkpoint(engine, folder / "next")
        here = it if rank else folder / "next"
        kept = named(engine)
        refused("rank 1 sees another checkpoint at", load_checkpoint, engine, here)
        if rank == 0:
            changed = {**state(), "1.0.bias": torch.zeros(3), "more": torch.zeros(2)}
            changed.pop("4.running_var")
            torch.save(changed, folder / "wrong.pt")
        dist.barrier()
        for message in (
            r"1\.0\.bias: expected \[8\], got \[3\]",
            r"4\.running_var: expected \[8\], is missing",
            "more: the model has no such tensor",
        ):
            refused(message, load_checkpoint, engine, folder / "wrong.pt")
        if rank == 1:  # as where every machine has a copy
            it = Path(shutil.copytree(it, folder / "copy"))
            (damaged,) = it.rglob("__1_0.distcp")
            content = bytearray(damaged.read_bytes())
            content[len(content) // 2] ^= 1
            damaged.write_bytes(bytes(content))
        refused(r"^rank 1: .*__1_0\.distcp is damaged", load_checkpoint, engine, it)
        assert same(named(engine), kept)
        train(engine, 3, 4)


def killed(folder: Path) -> None:
    """Rank 1 dies when it has written its file, and the metadata is not there yet."""
    with trainer(dropping(0), 2, timeout=20.0) as engine:
        save_checkpoint(engine, folder, step=1)
        train(engine, 0, 1)
        if dist.get_rank() == 1:
            os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
        save_checkpoint(engine, folder, step=2)


def test_a_rank_that_is_killed_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, on_ranks: Ranks
) -> None:
    path = tmp_path / "it"
    started = time.monotonic()
    with pytest.raises(PipelineError, match=r"rank 1 .*last heard of in sav"):
        on_ranks(killed, 2, (path,), timeout=100)
    assert time.monotonic() - started < 60
    assert len([*path.glob("save-*")]) == 2  # the old one's files, and what the killed one left
    assert same(dropping(0).state_dict(), read_checkpoint(path))
    with trainer(dropping(5), 2, ranks=1) as engine:
        assert load_checkpoint(engine, path).step == 1
        save_checkpoint(engine, path, step=3)
        assert load_checkpoint(engine, path).step == 3
    assert len([*path.glob("save-*")]) == 1
