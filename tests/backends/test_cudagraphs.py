"""Captured graphs, with a stand-in for capture: what is pending survives every replay."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import autosplit
from autosplit import Stage
from autosplit.backends.compiled_graph import BACKENDS
from autosplit.backends.cudagraphs import CudaGraphs, Recording
from autosplit.errors import BackendError
from autosplit.passes.graph import Kind, Role, set_outputs
from autosplit.pipeline import PipelineTrainer, StageOptions
from autosplit.torch_internals.state import versions

ORDERS = [((0, 1, 2), (0, 1, 2)), ((2, 0, 1), (1, 2, 0))]


class Rerun(CudaGraphs):
    """Does the work again in place of replaying it, and writes over the same results."""

    device_type = "cpu"
    recordings = 0

    def record(self, function: Callable[[], list[Any]], device: torch.device) -> Recording:
        type(self).recordings += 1
        with torch.random.fork_rng():
            results = function()

        def replay() -> None:
            for old, new in zip(results, function(), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        return Recording(replay, results)

    def stream(self, device: torch.device) -> int:
        return 0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[Rerun]:
    monkeypatch.setitem(BACKENDS, "cudagraphs", Rerun)  # type: ignore[arg-type]
    monkeypatch.setattr(Rerun, "recordings", 0)
    return Rerun


class Block(nn.Module):
    """Buffers, random numbers, a tied weight, and a view of what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        hidden = nn.functional.dropout(hidden, 0.3)
        return self.up(hidden.view(-1, 6)) * self.scale + x


def data(device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    return [[torch.randn(4, 6, device=device) for _ in range(3)] for _ in range(2)]  # type: ignore[return-value]


def steps(
    model: nn.Module, backend: str, orders: list[tuple[Any, Any]], **options: Any
) -> list[Tensor]:
    """Everything that three pending microbatches of two steps yield."""
    device = next(model.parameters()).device.type
    model = copy.deepcopy(model)
    xs, grads = data(device)
    stage = Stage(model, [xs[0].clone().requires_grad_()], backend=backend, **options)
    found: list[Any] = []
    torch.manual_seed(7)
    for backward_order, weight_order in orders:
        found += [stage.forward(m, [x.clone()])[0] for m, x in enumerate(xs)]
        found += [stage.backward_input(m, [grads[m].clone()])[0] for m in backward_order]
        for m in weight_order:
            stage.backward_weight(m)
        stage.publish()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *model.buffers()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("options", [{}, {"accumulation": "fused", "slices": 2}])
def test_pending_microbatches_survive(stand_in: type[Rerun], options: dict[str, Any]) -> None:
    model = Block()
    found = steps(model, "cudagraphs", ORDERS, **options)
    assert stand_in.recordings
    assert same(found, steps(model, "eager", ORDERS, **options))


def test_each_graph_is_captured_once(stand_in: type[Rerun]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    stage = Stage(model, [torch.randn(2, 3, requires_grad=True)], backend="cudagraphs")

    def run(pending: int) -> int:
        before = stand_in.recordings
        for m in range(pending):
            stage.forward(m, [torch.randn(2, 3)])
        for m in range(pending):
            stage.backward_input(m, [torch.randn(2, 3)])
        for m in range(pending):
            stage.backward_weight(m)
        return stand_in.recordings - before

    assert run(1) == 3  # F, I, W
    assert run(3) == 1  # W that adds
    assert run(3) == run(2) == 0


def test_autograd_face(stand_in: type[Rerun]) -> None:
    model = Block()
    xs, grads = data()
    found = []
    for backend in ("cudagraphs", "eager"):
        mine = copy.deepcopy(model)
        split = autosplit.split(mine, backend=backend, fullgraph=True, max_pending=math.inf)
        torch.manual_seed(7)
        leaves = [x.clone().requires_grad_() for x in xs]
        outputs = [split(leaf) for leaf in leaves]
        for at in (2, 0, 1):
            outputs[at].backward(grads[at])
        split.backward_weight(2)
        split.backward_weight()
        gradients = [leaf.grad for leaf in leaves] + [p.grad for p in mine.parameters()]
        found.append([*outputs, *gradients])
    assert same(*found)


def test_trainer(stand_in: type[Rerun]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
    inputs, targets = torch.randn(8, 6), torch.randn(8, 6)
    found = []
    for backend in ("cudagraphs", "eager"):
        with PipelineTrainer(
            list(copy.deepcopy(model)),
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            ranks=1,
            microbatches=4,
            stage_options=StageOptions(backend=backend),
        ) as engine:
            found.append([engine.step((inputs, targets)) for _ in range(3)])
    assert stand_in.recordings
    assert same(*found)


def test_moved_parameters_are_read_where_they_are(stand_in: type[Rerun]) -> None:
    model = nn.Linear(3, 3)
    split = autosplit.split(model, backend="cudagraphs")
    x = torch.randn(2, 3)
    with torch.no_grad():
        split(x)
        kept, model.weight.data = model.weight.data, torch.randn(3, 3)
        kept.zero_()
        assert torch.equal(split(x), model(x))
    assert stand_in.recordings == 2


class Viewing(nn.Module):
    """Outputs that lie in one another."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.view(-1)[2:]


def test_outputs_share_what_they_share_in_eager(stand_in: type[Rerun]) -> None:
    model, x = Viewing(), torch.randn(4, 6)
    split = autosplit.split(model, backend="cudagraphs")
    (whole, part), later = split(x), split(x + 1)
    assert same([whole, part], list(model(x)))
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert whole.untyped_storage().data_ptr() != later[0].untyped_storage().data_ptr()


def test_parts_of_inputs_are_handed_over_as_such(stand_in: type[Rerun]) -> None:
    """Writes into them are then counted."""
    graph = fx.Graph()
    x, weight = torch.randn(8)[2:], nn.Parameter(torch.randn(2, 3))
    taken = []
    for name, kind, value in (("x", Kind.INPUT, x), ("weight", Kind.PARAMETER, weight)):
        taken.append(graph.placeholder(name))
        taken[-1].meta = {"val": value, "role": Role(kind, name)}
    made = [
        graph.call_function(torch.ops.aten.slice.Tensor, (taken[0], 0, 1, 4)),
        graph.call_function(torch.ops.aten.t.default, (taken[1],)),
        taken[0],
        graph.call_function(torch.ops.aten.neg.default, (taken[0],)),
    ]
    for node, value in zip(made, (x[1:4], weight.t(), x, -x), strict=True):
        node.meta.setdefault("val", value)
    set_outputs(graph, [(Role(Kind.SAVED, f"saved_{at}"), node) for at, node in enumerate(made)])
    call = Rerun().compile("forward", fx.GraphModule({}, graph)).call
    kept = []
    for given in (x, x + 1):
        part, turned, whole, fresh = call([given, weight])
        assert same([part, turned, whole, fresh], [given[1:4], weight.t(), given, -given])
        assert whole is given
        before = versions((part, turned))
        with torch.no_grad():
            given.add_(1)
            weight.add_(1)
        assert versions((part, turned)) == tuple([count + 1 for count in before])
        kept.append((part, turned, whole))
        del fresh
    assert stand_in.recordings == 1


def test_expanded_inputs(stand_in: type[Rerun]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    split = autosplit.split(model, backend="cudagraphs")
    for _ in range(2):
        x = torch.randn(1, 3).expand(4, 3)
        assert torch.equal(split(x), model(x))
    assert stand_in.recordings


def test_writing_into_a_parameter_between_is_refused(stand_in: type[Rerun]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    split = autosplit.split(model, backend="cudagraphs")
    output = split(torch.randn(2, 3))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(autosplit.SplitError, match=r"written in place .*2\.weight"):
        output.sum().backward()


@pytest.mark.parametrize("face", [autosplit.split, Stage])
def test_refused_on_the_cpu(face: Callable[..., Any]) -> None:
    expected = (
        r"^the forward graph for backend 'cudagraphs' needs every tensor on one CUDA device; "
        r".* is on cpu\. Move it there before splitting; backend='eager' runs every graph"
    )
    with pytest.raises(BackendError, match=expected):
        face(nn.Linear(2, 2), (torch.randn(1, 2),), backend="cudagraphs")


def test_sizes_that_vary_are_refused() -> None:
    graph = fx.Graph()
    size = graph.placeholder("size")
    size.meta = {"val": ShapeEnv().create_unbacked_symint(), "role": Role(Kind.INPUT, "size")}
    set_outputs(graph, [(Role(Kind.OUTPUT, "out"), size)])
    with pytest.raises(BackendError, match=r"forward graph .* needs fixed sizes, and input size"):
        Rerun().compile("forward", fx.GraphModule({}, graph))


def test_failed_capture_names_the_graph(
    stand_in: type[Rerun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Rerun, "record", refuse)
    split = autosplit.split(nn.Linear(2, 2), backend="cudagraphs")
    with pytest.raises(BackendError, match=r"cannot capture the forward graph \(operation not"):
        split(torch.randn(1, 2))


class Device:
    """Notes what is asked of torch.cuda; whoever waits for the whole device fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, self._refuse)
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda each: contextlib.nullcontext())
        for name in ("Stream", "current_stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())

    def _refuse(self) -> None:
        pytest.fail("a wait for the device while a receive is posted would never end")

    def wait_stream(self, stream: Device) -> None:
        pass

    def capture_begin(self, *, capture_error_mode: str) -> None:
        self.log.append(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self.log.append("end")
        if "broken" in self.log:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.log.append("replay")


def test_capture_waits_for_nothing_but_its_own_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    device, value = Device(monkeypatch), torch.ones(1)

    def function() -> list[Any]:
        device.log.append("run")
        return [value]

    recording = CudaGraphs().record(function, torch.device("cuda"))
    recording.replay()
    assert recording.results[0] is value
    assert device.log == ["run", "begin thread_local", "run", "end", "replay"]


def test_a_capture_that_fails_is_ended_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)

    def function() -> list[Any]:
        if device.log:
            device.log.append("broken")
            raise RuntimeError("operation not permitted when stream is capturing")
        return []

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs().record(function, torch.device("cuda"))
    assert device.log == ["begin thread_local", "broken", "end"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"accumulation": "fused", "slices": 2}])
def test_on_a_device(options: dict[str, Any]) -> None:
    model = Block().to("cuda")
    found = steps(model, "cudagraphs", ORDERS, **options)
    for mine, expected in zip(found, steps(model, "eager", ORDERS, **options), strict=True):
        torch.testing.assert_close(mine, expected)
