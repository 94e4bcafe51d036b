"""Times saving and loading beside torch's own, which neither writes nor compares digests."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.checkpoint.writer import unworried
from autosplit.pipeline import PipelineTrainer

WIDTH = 1024


def cost(mebibytes: int, folder: Path) -> list[dict[str, Any]]:
    """Seconds of saving and loading plain SGD's parameters, the better of three turns each.

    Args:
        mebibytes: of parameters.
        folder: an empty one.
    """
    layers = max(1, mebibytes * 2**20 // (4 * WIDTH * WIDTH))
    modules = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))]
    engine = PipelineTrainer(
        modules,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters),
        microbatches=1,
        ranks=1,
    )
    state = {"model": copy.deepcopy(modules[0].state_dict())}

    def torch_saves() -> None:
        shutil.rmtree(folder / "torch", ignore_errors=True)
        with unworried():
            save(state, checkpoint_id=folder / "torch", no_dist=True)

    def torch_loads() -> None:
        with unworried():
            load(state, checkpoint_id=folder / "torch", no_dist=True)

    size = f"{layers * 4 * WIDTH * WIDTH // 2**20} MiB"
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "save": (lambda: save_checkpoint(engine, folder / "own"), torch_saves),
        "load": (lambda: load_checkpoint(engine, folder / "own"), torch_loads),
    }
    return [
        {"of": f"{name} {size}", "autosplit s": _best(ours), "torch s": _best(theirs)}
        for name, (ours, theirs) in calls.items()
    ]


def _best(call: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)
