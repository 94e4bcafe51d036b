"""Batches that a trainer refuses, and the steps that it takes behind them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import BatchError, PipelineError
from autosplit.pipeline.trainer import PipelineTrainer
from tests.pipeline.workers import block, data, trainer

X, Y = data(16)
BY_EVERY_CALL = ("indivisible", "other samples")
CALLS = ("forward_backward", "evaluate", "measure", "step_async", "predict_memory")


class Counting(nn.Module):
    """A block that counts its forwards, also those of its copies."""

    def __init__(self, index: int, calls: Iterator[int]) -> None:
        super().__init__()
        self.block = block(index)
        self.calls = calls

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        return self

    def forward(self, x: Tensor) -> Tensor:
        next(self.calls)
        made: Tensor = self.block(x)
        return made


def by_rank(*batches: Any) -> Callable[[int], Any]:
    """One for each rank."""
    return lambda rank: batches[rank]


ALIKE: dict[str, Callable[[int], Any]] = {
    "targets of fewer samples": lambda rank: (X, Y[:4]),
    "indivisible": lambda rank: (X[:15], Y[:15]),
    "of no samples": lambda rank: (X[:0], Y[:0]),
    "no pair": lambda rank: X,
    "an array": lambda rank: (X.numpy(), Y),
    "nothing": lambda rank: None,
}
"""Batches that are the same on every rank."""

DIFFERENT: dict[str, Callable[[int], Any]] = {
    "targets of fewer samples, a part each": by_rank((X, None), (None, Y[:4])),
    "indivisible, a part each": by_rank((X[:15], None), (None, Y[:15])),
    "indivisible on the first": by_rank((X[:15], Y[:15]), (X, Y)),
    "indivisible on the last": by_rank((X, Y), (X[:15], Y[:15])),
    "no inputs": by_rank((None, Y), (X, Y)),
    "no targets": by_rank((X, Y), (X, None)),
    "other samples": by_rank((X[:8], Y[:8]), (X, Y)),
    "other targets": by_rank((X, Y), (X, Y.double())),
    "more inputs": by_rank((X, Y), ((X, X), Y)),
}


def _called(engine: PipelineTrainer, call: str, batch: Any) -> None:
    more = [lambda output, target: {"zero": 0.0}] if call == "measure" else []
    found = getattr(engine, call)(batch, *more)
    if call == "step_async":
        found.wait()


def refused(
    batches: Mapping[str, Callable[[int], Any]], call: str = "step", *, ranks: int = 2, **more: Any
) -> dict[str, Any]:
    """What one trainer says of batches, before its first step and behind each of the next; how many
    forwards ran meanwhile; and whether its steps are those of one that was given no such batch.
    """
    rank = dist.get_rank() if ranks > 1 else 0
    calls = itertools.count()
    said: dict[str, list[str]] = {name: [] for name in batches}
    ran, losses = 0, []

    def refuse(engine: PipelineTrainer, name: str) -> None:
        nonlocal ran
        before = next(calls)
        try:
            _called(engine, call, batches[name](rank))
        except BatchError as error:
            said[name].append(str(error))
        ran += next(calls) - before - 1

    with trainer(lambda index: Counting(index, calls), ranks=ranks, **more) as engine:
        for name in batches:
            refuse(engine, name)
        phase = engine._groups.place.phase
        for name in batches:
            losses.append(engine.step((X, Y)))
            refuse(engine, name)
        losses.append(engine.step((X, Y)))
        evaluated = engine.evaluate((X, Y))
    with trainer(ranks=ranks) as engine:
        same = [torch.equal(each, engine.step((X, Y))) for each in losses]
        same.append(torch.equal(evaluated, engine.evaluate((X, Y))))
    return {"said": said, "ran": ran, "phase": phase, "same": all(same)}


def known_and_without_waits() -> tuple[str, str]:
    """Of targets that only the last rank refuses."""
    with trainer() as engine:
        engine.step_async((X, Y)).wait()
        try:
            engine.step_async((X, Y if dist.get_rank() == 0 else Y[:4])).wait()
        except PipelineError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def on_two_ranks() -> dict[str, Any]:
    """All of the batches by ``step``, and one by every call."""
    found: dict[str, Any] = {
        "any shape": refused({**ALIKE, **DIFFERENT}),
        "one shape": refused({**ALIKE, **DIFFERENT}, memory_limit="1GiB"),
    }
    for call in CALLS:
        batches = {**ALIKE, **DIFFERENT}
        found[call] = refused({name: batches[name] for name in BY_EVERY_CALL}, call)
    found["without waits"] = known_and_without_waits()
    return found
