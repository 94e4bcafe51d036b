"""Every schedule, and random ones, over messages that obey NCCL's rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import pytest
import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.groups import Groups, greet
from autosplit.pipeline.engine.shapes import Negotiation, TensorMeta
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.routes import pairs_of, routes_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from tests.pipeline import rendezvous
from tests.pipeline.rendezvous import Port, Wire
from tests.pipeline.schedule.random_schedules import random_schedule

CPU = torch.device("cpu")
META = TensorMeta(torch.Size([2]), torch.float32, True)


class Counting:
    """Adds its index to what comes, doubles the gradient; knows which gradient met which W."""

    def __init__(self, index: int, last: bool) -> None:
        self._index = index
        self._last = last
        self._grads: dict[int, float] = {}
        self.weights: list[tuple[int, float]] = []

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        output = inputs[0] + self._index
        inputs.clear()
        return [output.sum()] if self._last else [output]

    def backward_input(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        (grad,) = grads
        assert grad is not None
        grads.clear()
        self._grads[microbatch] = float(grad.sum())
        return [torch.full((2,), self._grads[microbatch] * (microbatch + 1))]

    def backward_weight(self, microbatch: int) -> None:
        self.weights.append((microbatch, self._grads.pop(microbatch)))

    def backward(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        results = self.backward_input(microbatch, grads)
        self.backward_weight(microbatch)
        return results


def _run(
    schedule: Schedule,
    communicator: Callable[[int, int], Hashable] = rendezvous.by_direction,
    prefetch: int = 2,
    greeted: bool = True,
) -> tuple[list[float], dict[int, dict[int, float]]]:
    """Losses by microbatch, and per stage the gradient that each W found."""
    stages = [
        {i: Counting(i, i == schedule.stages - 1) for i in schedule.held(rank)}
        for rank in range(len(schedule.ranks))
    ]
    count = schedule.microbatches
    inputs = [[torch.full((2,), float(m))] for m in range(count)]

    def rank(port: Port) -> dict[int, Tensor]:
        negotiation = Negotiation("train", Groups(1, CPU, 1.0), lambda: None)
        for boundary in range(schedule.stages):
            negotiation.known[boundary] = (META,)
        transport = Transport(
            routes_of(schedule, port.rank),
            port,
            negotiation,
            device=CPU,
            prefetch=prefetch,
        )
        if greeted:
            greet(port, sorted(pairs_of(schedule, Feeds(schedule.stages))), CPU)
        grad = torch.tensor(1.0)
        executor = Executor(
            stages[port.rank],
            schedule,
            port.rank,
            transport,
            loss_grad=grad,
        )
        return executor.run(inputs, [[] for _ in range(count)])

    ranks = len(schedule.ranks)
    rows = rendezvous.on_every_rank(ranks, Wire(ranks, communicator, connected=False), rank)
    losses = {m: float(loss) for row in rows for m, loss in row.items()}
    weights: dict[int, dict[int, float]] = defaultdict(dict)
    for i, stage in (each for own in stages for each in own.items()):
        weights[i].update(stage.weights)
    return [losses[m] for m in range(count)], weights


def _expected(stages: int, count: int) -> tuple[list[float], dict[int, dict[int, float]]]:
    losses = [2.0 * (m + sum(range(stages))) for m in range(count)]
    grads = {
        stage: {m: float((2 * (m + 1)) ** (stages - 1 - stage)) for m in range(count)}
        for stage in range(stages)
    }
    return losses, grads


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_every_schedule(name: str, ranks: int, microbatches: int) -> None:
    family = SCHEDULES[name]
    if name.startswith("dualpipe"):
        microbatches = max(microbatches, 2 * ranks)
    stages = ranks * (family.chunks or 2)
    for split in {True, not family.fused}:
        schedule = build(name, stages, microbatches, split_backward=split, ranks=ranks)
        assert _run(schedule) == _expected(stages, microbatches)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("copies", [1, 2])
def test_random_schedules(prefetch: int, copies: int) -> None:
    """Messages of one pair may be used in another order than they are made in."""
    for seed in range(60):
        schedule = random_schedule(seed, copies=copies)
        found = _run(schedule, prefetch=prefetch)
        assert found == _expected(schedule.stages, schedule.microbatches), schedule


def _texts(rows: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def test_both_directions_on_one_communicator_would_hang() -> None:
    """What the two groups of ``Groups`` are for, and that this transport can tell."""
    with pytest.raises(PipelineError, match=r"rank \d waits for ever"):
        _run(build("1f1b", 4, 8), rendezvous.by_pair)


def test_without_a_first_message_two_ranks_would_wait_for_each_other() -> None:
    """Each where it posts its first receive."""
    with pytest.raises(PipelineError, match=r"rank \d waits for ever"):
        _run(build("1f1b", 2, 2), greeted=False)


def test_a_circle_of_waiting_ranks_raises_here() -> None:
    rows = _texts(["0F0 0I0 0F1 0I1", "1F1 1I1 1F0 1I0"])
    with pytest.raises(PipelineError, match="waits for ever"):
        _run(Schedule("circle", 2, 2, rows, (0, 1), True))
