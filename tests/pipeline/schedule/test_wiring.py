"""Who feeds whom, and what a trainer takes as a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.schedule.wiring import Feeds, Source, Wiring
from autosplit.pipeline.training.stage_modules import Partitioned, StageSource
from tests.pipeline.tables import chain_of
from tests.pipeline.trainer_options import grouped

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


def test_without_a_wiring_stages_are_a_chain() -> None:
    feeds, chain = Feeds(3), Feeds(3, chain_of((1, 2), 3))
    assert list(feeds) == list(chain) == [(0, 1), (1, 2)]
    assert [feeds.from_batch([stage]) for stage in range(3)] == [None, frozenset(), frozenset()]
    assert feeds.first_from_batch == 0
    assert feeds.positions(1, 2) is None
    assert chain.positions(1, 2) == (0, 1)


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
