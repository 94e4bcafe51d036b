"""Two ranks that save, load, fail and die, for spawned processes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autosplit import CheckpointError
from autosplit.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.checkpoint_workers import dropping, named, train, trainer, whole
from tests.checkpoint.test_resume import by_group, steps


def told(call: Callable[[], object]) -> str:
    """What a checkpoint's error says."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "nothing"


def cut_otherwise(folder: Path) -> dict[str, Any]:
    """Six steps at a stretch, and in three parts, each from the checkpoint of the one before."""
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
    same = {name: torch.equal(value, values[name]) for name, value in named(engine).items()}
    return {**same, "losses": torch.equal(torch.cat(losses), expected), "after": losses[-1]}


def resumed(rank: int, folder: Path) -> dict[str, bool]:
    """Dropout in autosplit's own stages, and a scheduler: on, and from a checkpoint."""
    torch.manual_seed(10 + rank)
    with trainer(dropping(0), 2, stage_factory=None) as engine:
        torch.manual_seed(10 + rank)  # where the model was made, the ranks drew alike
        scheduler = by_group(engine.optimizer)
        steps(engine, scheduler, 0, 2)
        save_checkpoint(engine, folder / "run", scheduler=scheduler, step=2)
        expected = steps(engine, scheduler, 2, 4)
        values, drawn = named(engine), torch.rand(3)
    torch.manual_seed(99)
    with trainer(dropping(7), 2, stage_factory=None) as engine:
        scheduler = by_group(engine.optimizer)
        loaded = load_checkpoint(engine, folder / "run", scheduler=scheduler)
        losses = steps(engine, scheduler, loaded.step or 0, 4)
        same = all(torch.equal(value, values[name]) for name, value in named(engine).items())
        return {
            "losses": torch.equal(losses, expected),
            "values": same,
            "generators": torch.equal(torch.rand(3), drawn),
        }


def refusals(rank: int, folder: Path) -> dict[str, Any]:
    """What fails on rank 1 alone."""
    found: dict[str, Any] = {}
    with trainer(dropping(0), 2) as engine:
        train(engine, 0, 1)
        save_checkpoint(engine, folder / "it")
        kept = named(engine)
        train(engine, 1, 2)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        found["full disk"] = told(lambda: save_checkpoint(engine, folder / "it"))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found["other steps"] = told(lambda: save_checkpoint(engine, folder / "it", step=rank))
        other = folder / f"of {rank}"
        found["other folders"] = told(lambda: save_checkpoint(engine, other))
        load_checkpoint(engine, folder / "it")
        after = named(engine)
        found["old one"] = all(torch.equal(value, kept[name]) for name, value in after.items())
        train(engine, 2, 3)
        save_checkpoint(engine, folder / "next")
        here = folder / ("it" if rank else "next")
        found["two checkpoints"] = told(lambda: load_checkpoint(engine, here))
        kept = named(engine)
        found["wrong"] = told(lambda: load_checkpoint(engine, folder / "wrong.pt"))
        mine = folder / "it"
        if rank == 1:  # as where every machine has a copy
            mine = Path(shutil.copytree(mine, folder / "copy"))
            (damaged,) = mine.rglob("__1_0.distcp")
            content = bytearray(damaged.read_bytes())
            content[len(content) // 2] ^= 1
            damaged.write_bytes(bytes(content))
        found["damaged"] = told(lambda: load_checkpoint(engine, mine))
        after = named(engine)
        found["unchanged"] = all(torch.equal(value, kept[name]) for name, value in after.items())
        train(engine, 3, 4)
    return found


def two(folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    return {
        "cut otherwise": cut_otherwise(Path(folder)),
        "resumed": resumed(rank, Path(folder)),
        "refusals": refusals(rank, Path(folder)),
    }


def killed(folder: str) -> None:
    """Rank 1 dies when it has written its file, and the metadata is not there yet."""
    rank = int(os.environ["RANK"])
    with trainer(dropping(0), 2, timeout=20.0) as engine:
        save_checkpoint(engine, Path(folder), step=1)
        train(engine, 0, 1)
        if rank == 1:
            os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
        save_checkpoint(engine, Path(folder), step=2)
