"""Pipelines whose tensors skip stages, held bit for bit against plain autograd."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.stage_builder import dependence_of
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.routes import Source, StageDataflow, Wiring, routes_of
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.playing import recv_posting_order
from autosplit.trainer import tuning
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.schedule.random_schedules import random_schedule
from tests.pipeline.tables import chain_of
from tests.trainer import wired
from tests.zoo import Made

CPU = torch.device("cpu")
ROWS = 3


@st.composite
def wirings(draw: st.DrawFn) -> wired.Wired:
    """Any graph over two to five stages; outputs that nobody uses, stages that take nothing of
    the one before, and outputs that are integers among them.
    """
    stages = draw(st.integers(2, 5))
    outputs = tuple(draw(st.integers(1, 3)) for _ in range(stages - 1))
    inputs = []
    for stage in range(stages):
        expected = [Source(None, 0), Source(None, 1)]
        expected += [Source(s, p) for s in range(stage) for p in range(outputs[s])]
        inputs.append(tuple(draw(st.lists(st.sampled_from(expected), min_size=1, unique=True))))
    integers = {s: draw(st.integers(0, count - 1)) for s, count in enumerate(outputs)}
    return wired.Wired(Wiring(tuple(inputs), outputs), integers)


class Noting(ReferenceStage):
    """Keeps each microbatch's weight gradients apart."""

    def __init__(self, module: nn.Module, args: list[Tensor], index: int) -> None:
        super().__init__(module, args, index=index)
        self.found: dict[int, dict[str, Tensor]] = {}

    def backward_weight(self, microbatch: int) -> None:
        super().backward_weight(microbatch)
        self.found[microbatch], self.gradients = self.gradients, {}


def _stages(model: wired.Wired, batch: list[Tensor]) -> tuple[list[Noting], list[Any]]:
    """The stages, and what they agree on at each boundary."""
    stages: list[Noting] = []
    expected: list[tuple[TensorMeta, ...]] = []
    for index, sources in enumerate(model.wiring.inputs):
        metas = [None if s.stage is None else expected[s.stage][s.position] for s in sources]
        args = [
            batch[s.position]
            if meta is None
            else torch.zeros(meta.shape, dtype=meta.dtype, requires_grad=meta.requires_grad)
            for s, meta in zip(sources, metas, strict=True)
        ]
        module = model.build(index)
        if index == model.stages - 1:
            module = Made(lambda loss, *x: loss.module(*x).square().mean(), module=module)
        stages.append(Noting(module, args, index))
        expected.append(tuple(TensorMeta(*spec) for spec in stages[-1].output_specs))
    return stages, expected


Wire = dict[tuple[int, int, int], Future[Tensor]]
"""Messages by their ranks and number."""


class Port:
    """One rank's end of messages that arrive in the order of their sends."""

    timeout = 30.0

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self._counts: Counter[tuple[int, int]] = Counter()

    def named(self, peer: int) -> str:
        return f"rank {peer}"

    def _next(self, source: int, target: int) -> Future[Tensor]:
        self._counts[source, target] += 1
        return self._wire.setdefault((source, target, self._counts[source, target]), Future())

    def isend(self, tensor: Tensor, peer: int) -> Any:
        self._next(self._rank, peer).set_result(tensor.clone())
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    def irecv(self, buffer: Tensor, peer: int) -> Any:
        came = self._next(peer, self._rank)
        return SimpleNamespace(wait=lambda: buffer.copy_(came.result(self.timeout)))


def _run(model: wired.Wired, schedule: Schedule) -> list[Noting]:
    """Every rank on a thread."""
    inputs = [[torch.randn(ROWS), torch.arange(ROWS) % 2] for _ in range(schedule.microbatches)]
    stages, registered = _stages(model, inputs[0])
    dataflow = StageDataflow(model.stages, model.wiring)
    boundaries = Boundaries()
    boundaries.outputs.update(enumerate(registered))
    pairs = zip(stages, registered, strict=True)
    boundaries.resolve_gradients([dependence_of(item, len(out)) for item, out in pairs], dataflow)

    wire: Wire = {}
    posts = recv_posting_order(schedule, dataflow)

    def run(rank: int) -> None:
        routes, port = routes_of(schedule, dataflow)[rank], Port(wire, rank)
        executor = Executor(
            {i: stage for i, stage in enumerate(stages) if schedule.placement[i] == rank},
            schedule,
            rank,
            Transport(routes, port, device=CPU, posts=posts[rank]),
        )
        count = len(inputs)
        loss_grads: Any = [[torch.tensor(1.0)]] * count
        executor.run(inputs, [[]] * count, [boundaries] * count, loss_grads=loss_grads)

    with ThreadPoolExecutor(len(schedule.ranks)) as pool:
        [*pool.map(run, range(len(schedule.ranks)))]
    for m, batch in enumerate(inputs):
        modules = [model.build(index) for index in range(model.stages)]
        wired.forward(modules, model.wiring, batch).square().mean().backward()
        for index, stage in enumerate(stages):
            pairs = modules[index].named_parameters()
            expected = {n: p.grad for n, p in pairs if p.grad is not None}
            results = {n.removeprefix("module."): item for n, item in stage.found[m].items()}
            assert results.keys() == expected.keys(), (m, index)
            for name, gradient in results.items():
                assert torch.equal(gradient, expected[name]), (m, index, name)
    return stages


@settings(max_examples=60, deadline=None)
@given(wirings(), st.integers(0, 10**6))
def test_random_graphs_under_random_schedules(model: wired.Wired, seed: int) -> None:
    """The gradients of plain autograd."""
    _run(model, random_schedule(seed, model.stages))


def test_an_output_taken_twice_by_one_stage() -> None:
    """Its gradients are summed before they are sent."""
    wiring = Wiring(((Source(None, 0),), (Source(0, 0), Source(0, 0))), (1,))
    inputs, targets = workers.data(8)
    expected, grads = wired.reference(wired.Wired(wiring), [inputs], targets, 4)
    with workers.trainer(wired.Wired(wiring), ranks=1) as engine:
        assert torch.equal(engine.forward_backward((inputs, targets)), expected)
        assert wired.differences(engine.gradients(), grads) == []


def test_auto_searches_for_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The medians of the first steps, by stage and kind, along the wiring."""
    kinds = [ActionKind(kind) for kind in "FIW"]
    took = {
        (stage, kind): 1.0 + stage + at / 4 for stage in (0, 1) for at, kind in enumerate(kinds)
    }
    monkeypatch.setattr(tuning, "median_durations", lambda steps: took)
    requested = Mock(wraps=tuning.search)
    monkeypatch.setattr(tuning, "search", requested)
    wiring = Wiring(((Source(None, 0),), (Source(0, 0), Source(0, 0))), (1,))
    with workers.trainer(wired.Wired(wiring), ranks=1, schedule="auto") as engine:
        for _ in range(tuning.MEASURED + 1):
            requested.assert_not_called()
            engine.step(workers.data(8))
    costs = requested.call_args.args[0]
    assert costs.wiring == wiring
    assert costs.times == [(1.0, 1.25, 1.5), (2.0, 2.25, 2.5)]


def test_a_stage_that_puts_out_something_else_than_the_wiring_says() -> None:
    class Wrong(wired.Wired):
        def build(self, index: int) -> nn.Module:
            return wired.Mix(0, 1, 2)

    wiring = chain_of((1,))
    with (
        workers.trainer(Wrong(wiring), ranks=1) as engine,
        pytest.raises(PipelineError, match=r"2 tensors, but Wiring\.outputs has 1"),
    ):
        engine.step(workers.data(8))


def test_evaluation_refuses_to_write_into_what_others_take() -> None:
    """Stages that train have copies; modules that evaluate are the user's own."""
    writing = Made(lambda _, x, *others: x.mul_(2) + sum(others))

    class Twice(wired.Wired):
        def build(self, index: int) -> nn.Module:
            return writing if index == 1 else super().build(index)

    first, second = Source(0, 0), Source(1, 0)
    alone = Twice(Wiring(((Source(None, 0),), (first,), (second,)), (1, 1)))
    with workers.trainer(alone, ranks=1) as engine:
        assert engine.evaluate(workers.data(8)).shape == (4,)
    shared = Twice(Wiring(((Source(None, 0),), (first,), (first, second)), (1, 1)))
    with (
        workers.trainer(shared, ranks=1) as engine,
        pytest.raises(PipelineError, match="stage 1 writes in place into an input that other"),
    ):
        engine.evaluate(workers.data(8))


class Model(nn.Module):
    """A whole model with a skip, a mask used late, and tied ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = first = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask.unsqueeze(-1)
        return self.head(x + first)


def test_a_whole_module_is_cut_by_the_trainer() -> None:
    ids = torch.randint(
        20, (8, 5), generator=torch.Generator(torch.get_default_device()).manual_seed(0)
    )
    inputs = {"ids": ids, "mask": ids % 3 > 0}
    model = Model()
    losses = []
    for m in range(4):
        output = model(*(tensor.chunk(4)[m] for tensor in inputs.values()))
        loss = F.cross_entropy(output.flatten(0, 1), ids.chunk(4)[m].flatten())
        (loss / 4).backward()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with PipelineTrainer(
        Model(),
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        workers.sgd,
        stages=3,
        example={name: item[:2] for name, item in inputs.items()},
        microbatches=4,
        max_grad_norm=1e9,
        ranks=1,
    ) as engine:
        assert torch.equal(engine.evaluate((inputs, ids)), torch.stack(losses))
        assert torch.equal(engine.forward_backward((inputs, ids)), torch.stack(losses))
        norm = torch.nn.utils.get_total_norm(gradients)
        assert engine.grad_norm == pytest.approx(float(norm))
        results = {n: g for gradient in engine.gradients().values() for n, g in gradient.items()}
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert {*results} - {"head.weight"} == {*expected}
    for name, gradient in expected.items():
        torch.testing.assert_close(results[name], gradient)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-v"},
        {"schedule": "gpipe", "split_backward": False},
        {"weights": "2bp", "stage_factory": ReferenceStage},
    ],
)
@ranks(2)
def test_a_u_net_over_two_ranks(options: dict[str, Any]) -> None:
    """Skips over stages, a mask used late, labels in the last stage, and inputs by name."""
    batch = wired.unet_batch(8)
    expected, grads = wired.reference(wired.UNet(), list(batch.values()), None, 4)
    inputs = {"loss_fn": lambda output, targets: output, "stage_factory": None, **options}
    with workers.trainer(wired.UNet(), **inputs) as engine:
        # Each rank only gives what its stages take.
        local = [wired.UNet.wiring.inputs[stage] for stage in engine.modules]
        received = {s.position for sources in local for s in sources if s.stage is None}
        some = {n: t for at, (n, t) in enumerate(batch.items()) if at in received}
        assert torch.equal(engine.forward_backward((some, ())), expected)
        assert torch.equal(engine.evaluate((tuple(batch.values()), ())), expected)
        assert wired.differences(engine.gradients(), grads) == []
