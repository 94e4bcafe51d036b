"""What the ranks run: a small trainer in which one of them has a fault."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions, process_group
from autosplit.stage import Stage

from .cells import Cell

WIDTH = 8
MICROBATCHES = 4
STEPS = 4
CALLS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "compile": "compile"}


def rank(cell: Cell, folder: str, timeout: float) -> None:
    """Train, and note in ``folder`` how that ended; the error goes on."""
    note = Note(pathlib.Path(folder))
    note.write()
    try:
        with contextlib.suppress(_LeaveError):
            _train(cell, note, timeout)
    except BaseException as error:
        note.write(said=str(error), at=time.time())
        raise
    note.write(said="", at=time.time())


class Note:
    """What a rank leaves for the judge."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def write(self, **more: object) -> None:
        found = {"pid": os.getpid(), "port": int(os.environ["MASTER_PORT"]), **more}
        self._put(f"{dist.get_rank()}.json", json.dumps(found))

    def fault(self) -> None:
        self._put("fault.json", json.dumps(time.time()))

    def _put(self, name: str, text: str) -> None:
        """At once: a rank may be killed at any time."""
        draft = self._folder / f"{name}.{os.getpid()}"
        draft.write_text(text)
        draft.rename(self._folder / name)


class _Fault:
    """Happens once, at the second call in the place of the cell, at the first where it builds."""

    def __init__(self, cell: Cell, note: Note) -> None:
        self._cell = cell
        self._note = note
        self._calls = 0

    def at(self, place: str) -> None:
        if (place, dist.get_rank()) != (self._cell.place, self._cell.victim):
            return
        self._calls += 1
        first = {"build": 1, "compile": 1, "optimizer": 2, "loader": 2}
        if self._calls == first.get(place, MICROBATCHES + 2):
            self._note.fault()
            _happen(self._cell.fault)


class _LeaveError(Exception):
    """Goes to where the function returns, past the trainer's end."""


class _EndError(Exception):
    """The batches are at an end."""


def _happen(fault: str) -> None:
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "raise":
        raise ValueError("bad weather")
    if fault == "exit":
        os._exit(3)
    if fault == "sleep":
        time.sleep(600)
    if fault == "leave":
        raise _LeaveError
    if fault == "starve":
        raise _EndError


def _train(cell: Cell, note: Note, timeout: float) -> None:
    fault = _Fault(cell, note)

    def build(index: int) -> nn.Module:
        fault.at("build")
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def stage(module: nn.Module, args: Any, *, index: int) -> Stage:
        made = Stage(module, args, index=index)
        for place, name in CALLS.items():
            setattr(made, name, _before(getattr(made, name), partial(fault.at, place)))
        return made

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(lambda *_: fault.at("optimizer"))
        return made

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for seed in range(STEPS):
            try:
                fault.at("loader")
            except _EndError:
                return
            torch.manual_seed(seed)
            yield torch.randn(8, WIDTH), torch.randn(8, WIDTH)

    trainer = PipelineTrainer(
        build,
        F.mse_loss,
        optimizer,
        stages=cell.ranks,
        microbatches=MICROBATCHES,
        stage_options=StageOptions(stage_factory=stage),
        run_options=RunOptions(timeout=timeout),
    )
    for batch in batches():
        trainer.step(batch)
    trainer.close()


def _before(call: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    @wraps(call)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return both


def main() -> None:
    """A rank under torchrun."""
    fault, place, ranks, folder, timeout = sys.argv[1:]
    with process_group():
        rank(Cell(fault, place, int(ranks), "torchrun"), folder, float(timeout))


if __name__ == "__main__":
    main()
