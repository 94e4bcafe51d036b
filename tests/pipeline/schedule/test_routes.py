"""What travels between ranks, by wirings and by the order of sends."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.engine.boundaries import Negotiation, TensorMeta
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.groups import Groups, greet
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.routes import (
    Parcel,
    Routes,
    pairs_of,
    routes_of,
)
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds, Source, Wiring
from autosplit.pipeline.simulation.one_order import posts_of
from autosplit.pipeline.simulation.step_graph import StepGraph
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.training.stage_modules import Partitioned, StageSource
from tests.pipeline import rendezvous
from tests.pipeline.rendezvous import Port, Wire
from tests.pipeline.schedule.random_schedules import random_schedule
from tests.pipeline.tables import chain_of
from tests.pipeline.trainer_options import grouped

# --- what travels between ranks, as literal tables ------------------------------------------------


SKIPS = Wiring(
    inputs=(
        (Source(None, 0),),
        (Source(0, 0), Source(0, 1)),
        (Source(0, 1), Source(1, 0)),
        (Source(0, 2), Source(0, 0), Source(2, 0)),
    ),
    outputs=(3, 1, 1),
)


def _proven(routes: Routes) -> dict[str, int]:
    return {str(result): count for result, count in routes.proven.items()}


def test_gpipe_proves_activations_only_with_gradients() -> None:
    schedule = build("gpipe", 2, 3, split_backward=False)
    assert _proven(routes_of(schedule)[0]) == {"1I0": 3, "1I1": 3, "1I2": 3}
    assert _proven(routes_of(schedule)[1]) == {"0F0": 0, "0F1": 0, "0F2": 0}


@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", 4), ("interleaved", 2), ("zb-v", 2), ("gpipe", 1)]
)
@pytest.mark.parametrize("wiring", [None, SKIPS], ids=["chain", "skips"])
def test_the_simulator_sends_what_the_engine_sends(
    name: str, ranks: int, wiring: Wiring | None
) -> None:
    schedule, feeds = build(name, 4, 4, ranks=ranks), Feeds(4, wiring)
    sent = {
        (rank, peer): list(parcels)
        for rank in range(ranks)
        for peer, parcels in routes_of(schedule, feeds)[rank].sends.items()
    }
    graph = StepGraph(schedule, feeds=feeds, transfer=Transfer(latency=0.5))
    simulated: dict[tuple[int, int], list[Parcel]] = {}
    for message in itertools.chain(*graph.makes):
        if message.link is not None:
            simulated.setdefault(message.link, []).append(graph.parcels[message.parcel])
    assert simulated == sent
    assert bool(sent) == (ranks > 1)


# --- every schedule, and random ones, over messages that obey NCCL's rules ------------------------


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
    in_order: bool = False,
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
            routes_of(schedule)[port.rank],
            port,
            negotiation,
            device=CPU,
            prefetch=prefetch,
            posts=posts_of(schedule, Feeds(schedule.stages))[port.rank] if in_order else None,
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
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_every_schedule(name: str, ranks: int, microbatches: int) -> None:
    family = SCHEDULES[name]
    if name == "dualpipe-v":
        microbatches = max(microbatches, 2 * ranks)
    stages = ranks * (family.chunks or 2)
    for split in {True, not family.fused}:
        schedule = build(name, stages, microbatches, split_backward=split, ranks=ranks)
        assert _run(schedule) == _expected(stages, microbatches)
        found = _run(schedule, rendezvous.by_pair, in_order=True)
        assert found == _expected(stages, microbatches)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_random_schedules(prefetch: int) -> None:
    """Messages of one pair may be used in another order than they are made in."""
    for seed in range(25):
        schedule = random_schedule(seed)
        expected = _expected(schedule.stages, schedule.microbatches)
        assert _run(schedule, prefetch=prefetch) == expected, schedule
        assert _run(schedule, rendezvous.by_pair, in_order=True) == expected, schedule


def test_both_directions_on_one_communicator_would_hang() -> None:
    """With receives posted ahead: what the two groups of ``Groups`` are for, and that this
    transport can tell.
    """
    with pytest.raises(PipelineError, match=r"rank \d waits for ever"):
        _run(build("1f1b", 4, 8), rendezvous.by_pair)


def test_without_a_first_message_two_ranks_would_wait_for_each_other() -> None:
    """Each where it posts its first receive."""
    with pytest.raises(PipelineError, match=r"rank \d waits for ever"):
        _run(build("1f1b", 2, 2), greeted=False)


# --- who feeds whom, and what a trainer takes as a model ------------------------------------------


SKIP = Wiring(
    inputs=(
        (Source(None, 1),),
        (Source(0, 1), Source(0, 0), Source(0, 1)),
        (Source(1, 0), Source(None, 0), Source(0, 1)),
    ),
    outputs=(2, 1),
    names=("mask", "x"),
)


def test_feeds_of_a_wiring() -> None:
    feeds = Feeds(3, SKIP)
    assert [feeds.sources(stage) for stage in range(3)] == [(), (0,), (0, 1)]
    assert [feeds.targets(stage) for stage in range(3)] == [(1, 2), (2,), ()]
    assert list(feeds) == [(0, 1), (0, 2), (1, 2)]
    assert [feeds.positions(*pair) for pair in feeds] == [(0, 1), (1,), (0,)]
    taken = [feeds.from_batch([stage]) for stage in range(3)]
    assert taken == [frozenset([1]), frozenset(), frozenset([0])]
    assert feeds.from_batch([0, 2]) == frozenset([0, 1])
    assert feeds.first_from_batch == 0


@pytest.mark.parametrize(
    ("inputs", "outputs", "names", "text"),
    [
        ((), (), (), "of one stage or more, .* got those of 0 and 0 stages"),
        (((),), (1,), (), "got those of 1 and 1 stages"),
        (((Source(0, 0),),), (), (), "input 0 of stage 0 is output 0 of stage 0: it can take from"),
        (((), (Source(0, 2),)), (2,), (), "output 2 of stage 0: there are 2 outputs"),
        (((), (Source(-1, 0),)), (2,), (), "from stages before 1"),
        (((Source(None, -1),),), (), (), "the batch's input -1: there are 0 named inputs"),
        (((Source(None, 1),),), (), ("x",), "the batch's input 1: there are 1 named inputs"),
        (((Source(None, 1),),), (), ("x", "x"), "a name of its own"),
    ],
)
def test_bad_wirings(
    inputs: tuple[tuple[Source, ...], ...],
    outputs: tuple[int, ...],
    names: tuple[str, ...],
    text: str,
) -> None:
    with pytest.raises(PipelineError, match=text):
        Wiring(inputs, outputs, names)


class Cut:
    """Two stages, as ``autosplit.partition`` would give them."""

    wiring = chain_of((1,))
    shared = (((0, "weight"), (1, "weight")),)
    stages = 2

    def build(self, index: int) -> nn.Module:
        return nn.Linear(index + 1, 1)


def test_what_may_be_given_as_a_model() -> None:
    layers = [nn.Linear(1, 1), nn.Linear(1, 2)]
    for model in (layers, nn.ModuleList(layers)):
        assert StageSource.of(model).build(1) is layers[1]
    made = StageSource.of(lambda index: layers[index], 2)
    assert (made.count, made.build(1), made.wiring) == (2, layers[1], None)
    cut = Cut()
    assert isinstance(cut, Partitioned)
    stages = StageSource.of(cut, 2)
    assert (stages.count, stages.wiring, stages.shared) == (2, Cut.wiring, Cut.shared)
    assert isinstance(stages.build(1), nn.Linear)


def trainer_of(model: Any, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model,
        nn.MSELoss(),
        torch.optim.SGD,
        microbatches=1,
        ranks=1,
        **grouped(**options),
    )


def test_what_may_not() -> None:
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with pytest.raises(PipelineError, match=r"a Sequential is one module.*list, \[\*module\]"):
        trainer_of(layers)
    with pytest.raises(PipelineError, match="got 2 stages, but stages=3"):
        StageSource.of(Cut(), 3)
    with pytest.raises(PipelineError, match="example has no effect beside a model that is already"):
        trainer_of(Cut(), stages=2, example=())
    with pytest.raises(PipelineError, match="example has no effect beside stages"):
        trainer_of([*layers], example=())
