"""Messages between ranks, by wiring and by the order of sends."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.routes import (
    Routes,
    Source,
    StageDataflow,
    StageMessage,
    Wiring,
    routes_of,
)
from autosplit.pipeline.simulation.step_graph import StepGraph, Transfer
from autosplit.trainer.stage_modules import Partitioned, StageSource
from tests.pipeline.tables import chain_of
from tests.pipeline.workers import trainer

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


def _acked(routes: Routes) -> dict[str, int]:
    return {str(result): count for result, count in routes.acked_sends.items()}


def test_gpipe_proves_activations_only_with_gradients() -> None:
    schedule = build("gpipe", 2, 3, split_backward=False)
    assert _acked(routes_of(schedule)[0]) == {"1I0": 3, "1I1": 3, "1I2": 3}
    assert _acked(routes_of(schedule)[1]) == {"0F0": 0, "0F1": 0, "0F2": 0}


@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", 4), ("interleaved", 2), ("zb-v", 2), ("gpipe", 1)]
)
@pytest.mark.parametrize("wiring", [None, SKIPS], ids=["chain", "skips"])
def test_the_simulator_sends_what_the_engine_sends(
    name: str, ranks: int, wiring: Wiring | None
) -> None:
    schedule, dataflow = build(name, 4, 4, ranks=ranks), StageDataflow(4, wiring)
    sent = {
        (rank, peer): list(messages)
        for rank in range(ranks)
        for peer, messages in routes_of(schedule, dataflow)[rank].sends.items()
    }
    graph = StepGraph(schedule, dataflow=dataflow, transfer=Transfer(latency=0.5))
    simulated: dict[tuple[int, int], list[StageMessage]] = {}
    for message in itertools.chain(*graph.makes):
        if message.link is not None:
            simulated.setdefault(message.link, []).append(graph.stage_messages[message.number])
    assert simulated == sent
    assert bool(sent) == (ranks > 1)


# --- the dataflow between stages, and what a trainer takes as a model -----------------------------


SKIP = Wiring(
    inputs=(
        (Source(None, 1),),
        (Source(0, 1), Source(0, 0), Source(0, 1)),
        (Source(1, 0), Source(None, 0), Source(0, 1)),
    ),
    outputs=(2, 1),
    names=("mask", "x"),
)


def test_dataflow_of_a_wiring() -> None:
    dataflow = StageDataflow(3, SKIP)
    assert [dataflow.sources(stage) for stage in range(3)] == [(), (0,), (0, 1)]
    assert [dataflow.targets(stage) for stage in range(3)] == [(1, 2), (2,), ()]
    assert list(dataflow) == [(0, 1), (0, 2), (1, 2)]
    assert [dataflow.positions(*pair) for pair in dataflow] == [(0, 1), (1,), (0,)]
    received = [dataflow.from_batch([stage]) for stage in range(3)]
    assert received == [frozenset([1]), frozenset(), frozenset([0])]
    assert dataflow.from_batch([0, 2]) == frozenset([0, 1])
    assert dataflow.first_from_batch == 0


@pytest.mark.parametrize(
    ("inputs", "outputs", "names", "text"),
    [
        ((), (), (), "at least one, .* got 0 and 0 entries"),
        (((),), (1,), (), "got 1 and 1 entries"),
        (
            ((Source(0, 0),),),
            (),
            (),
            "input 0 of stage 0 is output 0 of stage 0: expected a source",
        ),
        (((), (Source(0, 2),)), (2,), (), "output 2 of stage 0: there are 2 outputs"),
        (((), (Source(-1, 0),)), (2,), (), "in a stage before 1"),
        (((Source(None, -1),),), (), (), "the batch's input -1: there are 0 named inputs"),
        (((Source(None, 1),),), (), ("x",), "the batch's input 1: there are 1 named inputs"),
        (((Source(None, 1),),), (), ("x", "x"), "names must be different"),
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


def test_accepted_forms_of_a_model() -> None:
    layers = [nn.Linear(1, 1), nn.Linear(1, 2)]
    for model in (layers, nn.ModuleList(layers)):
        assert StageSource.of(model).build(1) is layers[1]
    built = StageSource.of(lambda index: layers[index], 2)
    assert (built.count, built.build(1), built.wiring) == (2, layers[1], None)
    cut = Cut()
    assert isinstance(cut, Partitioned)
    stages = StageSource.of(cut, 2)
    assert (stages.count, stages.wiring, stages.shared) == (2, Cut.wiring, Cut.shared)
    assert isinstance(stages.build(1), nn.Linear)


def test_refused_forms_of_a_model() -> None:
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with pytest.raises(PipelineError, match=r"a Sequential is one module.*list, \[\*model\]"):
        trainer(layers, ranks=1)
    with pytest.raises(PipelineError, match="the model has 2 stages, but stages=3"):
        StageSource.of(Cut(), 3)
    with pytest.raises(PipelineError, match="example has no effect with a model that is already"):
        trainer(Cut(), stages=2, example=(), ranks=1)
    with pytest.raises(PipelineError, match="example has no effect with stages"):
        trainer([*layers], example=(), ranks=1)
