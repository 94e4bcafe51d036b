"""The engine enqueues, and waits for, what its model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.timing import SpanRecorder
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.routes import StageDataflow, routes_of
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.simulation.playing import recv_posting_order
from autosplit.pipeline.validation.communicators import COMPUTE
from autosplit.pipeline.validation.programs import engine_programs
from tests.pipeline.schedule.random_schedules import random_schedule

CPU = torch.device("cpu")
META = TensorMeta(torch.Size([1]), torch.float32, True)


class Log(SpanRecorder):
    """One rank's end of messages that are always there, and what it is asked: to compute; to send
    and receive, with whom; and which of these to wait for.
    """

    timeout = 1.0

    def __init__(self) -> None:
        super().__init__(0)
        self.calls: list[Any] = []
        self._waits: list[int] = []
        self._numbers = count()

    def run(self, actions: Sequence[Action], compute: Callable[[], Any]) -> Any:
        self.settle()
        self.calls += map(str, actions)
        return compute()

    def settle(self) -> None:
        """Log the awaited operations, sorted."""
        self.calls.append(("waits", sorted(self._waits)))
        self._waits.clear()

    def isend(self, tensor: Tensor, peer: int) -> Any:
        return self._message("send", peer)

    def irecv(self, buffer: Tensor, peer: int) -> Any:
        return self._message("receive", peer)

    def _message(self, kind: str, peer: int) -> Any:
        self.calls.append((kind, peer))
        return SimpleNamespace(wait=partial(self._waits.append, next(self._numbers)))


class Stage:
    """Computes nothing."""

    def forward(self, *_: Any) -> list[Tensor]:
        return [torch.zeros(1)]

    backward = backward_input = backward_weight = forward


def _enqueued(schedule: Schedule, rank: int) -> list[Any]:
    """By the engine, as it is over NCCL."""
    log, dataflow = Log(), StageDataflow(schedule.stages)
    boundaries = Boundaries()
    boundaries.outputs |= dict.fromkeys(range(schedule.stages), (META,))
    link: Any = log
    posts = recv_posting_order(schedule, dataflow)[rank]
    transport = Transport(routes_of(schedule)[rank], link, device=CPU, posts=posts)
    stages: Any = dict.fromkeys(schedule.stages_on(rank), Stage())
    executor = Executor(stages, schedule, rank, transport)
    microbatches = schedule.microbatches
    grads: Any = [[torch.ones(1)]] * microbatches
    inputs, sizes = [[torch.zeros(1)]] * microbatches, [boundaries] * microbatches
    executor.run(inputs, [[]] * microbatches, sizes, log, grads)
    log.settle()
    return log.calls


def _modelled(schedule: Schedule, rank: int) -> list[Any]:
    results: list[Any] = []
    numbers: dict[int, int] = {}
    waited: set[int] = set()
    for place, operation in enumerate(engine_programs(schedule)[rank]):
        waits = {*operation.after}.intersection(numbers) - waited
        if COMPUTE in operation.queues or operation.text == "settled":
            results.append(("waits", sorted(numbers[wait] for wait in waits)))
            waited |= waits
        if COMPUTE in operation.queues:
            results.append(operation.text)
        if operation.text == "settled":
            return results
        for part in operation.parts:
            if part.is_message:
                numbers[place] = len(numbers)
                results.append((part.kind, *part.peers))
    return results


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule(name: str) -> None:
    schedule = build(name, 4 * (SCHEDULES[name].chunks or 2), 8, ranks=4)
    for rank in range(4):
        assert _enqueued(schedule, rank) == _modelled(schedule, rank)


def test_schedules_that_nobody_would_write() -> None:
    for seed in range(30):
        schedule = random_schedule(seed)
        for rank in range(len(schedule.ranks)):
            assert _enqueued(schedule, rank) == _modelled(schedule, rank), seed
