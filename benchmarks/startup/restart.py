"""First starts and restarts of a pipeline whose model the trainer cuts, each in new processes."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autosplit.checkpoint import CheckpointManager
from autosplit.pipeline import PipelineTrainer, StageOptions
from autosplit.planner import captured_model, costs
from autosplit.ranks.launch import launch
from autosplit.stage import Stage

from ..results import Rows, Target, table, verdicts
from .measure import Settings
from .models import MODELS

RANKS, MICROBATCHES = 2, 4
TARGET = Target("over the first start", at_most=0.5, style=".2f")
DEPTH = 32  # layers of the target

_TIMEOUT = 600.0
_STARTS = ("first", "again")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model and depth."""
    for model in settings.models:
        for layers in settings.depths((8, DEPTH)):
            starts: dict[str, list[Any]] = {start: [] for start in _STARTS}
            for _ in range(settings.turns):
                with tempfile.TemporaryDirectory() as folder:
                    for start in _STARTS:
                        on_ranks = launch(
                            start_run, RANKS, (model, layers, folder), timeout=_TIMEOUT
                        )
                        starts[start].append(on_ranks[0])
            yield {"name": f"{model} {layers}", "model": model, "layers": layers, **starts}


def start_run(name: str, layers: int, folder: str) -> dict[str, Any]:
    """Train the first step of a run on this rank; the first start saves a checkpoint.

    Returns:
        seconds from the model to the end of the first step, the part of them before that step, the
        names of the cuts, and how often the whole model and stages of it were captured, and blocks
        were timed.
    """
    torch.manual_seed(0)
    model, batch = MODELS[name](layers)
    torch._dynamo.reset()  # imported here, not in the trainer
    manager = CheckpointManager(folder)
    with contextlib.ExitStack() as stack:
        calls = {name: stack.enter_context(counted(*place)) for name, place in COUNTED.items()}
        start = time.perf_counter()
        trainer = PipelineTrainer(
            model,
            _loss,
            torch.optim.AdamW,
            microbatches=MICROBATCHES,
            stages=RANKS,
            example=batch,
            stage_options=StageOptions(planning=manager.planning(stages=RANKS)),
        )
        stack.enter_context(trainer)
        step = manager.resume(trainer)
        built = time.perf_counter()
        trainer.step({key: torch.cat([value] * MICROBATCHES) for key, value in batch.items()}, ())
        seconds = time.perf_counter() - start
        if not step:
            manager.save(trainer, step=1)
        cuts = (trainer.planning or {})["cut_at"]
    numbers = {name: call.call_count for name, call in calls.items()}
    return {"seconds": seconds, "building": built - start, "cuts": cuts, **numbers}


def _loss(output: Any, targets: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


COUNTED: dict[str, tuple[Any, str]] = {
    "whole": (captured_model, "capture_forward"),
    "stages": (Stage, "__init__"),
    "timed": (costs, "time_stages"),
}
"""What is counted -> the function and where it is."""


@contextlib.contextmanager
def counted(place: Any, name: str) -> Iterator[mock.Mock]:
    """Count the calls of a function or a method."""
    function: Callable[..., Any] = getattr(place, name)
    counter = mock.Mock()

    def call(*args: Any, **kwargs: Any) -> Any:
        counter()
        return function(*args, **kwargs)

    with mock.patch.object(place, name, call):
        yield counter


def render(rows: Rows) -> str:
    """Seconds of both starts, and what each did."""
    headers = ["model", "layers", "first start s", "its building s", "restart s"]
    headers += ["its building s", TARGET.name, "captures", "in a restart", "timed blocks, restart"]
    cells = [
        [
            row["model"],
            str(row["layers"]),
            *(f"{_median(row[s], key):.1f}" for s in _STARTS for key in ("seconds", "building")),
            TARGET.cell(_ratio(row)) if row["layers"] == DEPTH else f"{_ratio(row):.2f}",
            *(str(row[s][-1]["whole"] + row[s][-1]["stages"]) for s in _STARTS),
            str(row["again"][-1]["timed"]),
        ]
        for row in rows
    ]
    deep = {row["model"]: _ratio(row) for row in rows if row["layers"] == DEPTH}
    judged = [f"Of {DEPTH} layers:", verdicts([(TARGET, deep)])] if deep else []
    return "\n".join([table(headers, cells), "", *judged])


def _median(starts: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(start[key] for start in starts))


def _ratio(row: dict[str, Any]) -> float:
    return _median(row["again"], "seconds") / _median(row["first"], "seconds")
