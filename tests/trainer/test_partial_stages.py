"""Stages that no single graph holds, in a trainer beside plain autograd."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import CaptureError, DeferralWarning, PipelineError, SplitError
from autosplit.errors import PythonStateError
from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.engine.partial_stage import PartialStage
from autosplit.pipeline.engine.stage_factory import SplitStage
from autosplit.runtime.options import SplitOptions
from tests.dynamo import breaking
from tests.kept_ranks import ranks
from tests.mesh.workers import mesh_of
from tests.pipeline.trainer_options import grouped

MICROBATCHES = 4


class Everything(breaking.TwoLayers):
    """Writes into its input and a buffer, branches on data, has a side effect, and shares a weight
    between graphs and ordinary code. Some parameters are used in some microbatches, or never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch, self.outside = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(3))
        self.rows = 0

    @torch.compiler.disable
    def untraced(self, h: Tensor) -> Tensor:
        return F.linear(self.outside(h), self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        x.mul_(2.0)
        h = self.untraced(self.norm(self.a(x)))
        if x.sum() > 0:
            h = self.branch(h)
        return self.b(h.tanh())


class Dropping(breaking.TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x))
        if not torch.compiler.is_compiling():  # only code outside of graphs is one whole
            h = F.dropout(h)
        return self.b(h)


class LeavesLoss(breaking.TwoLayers):
    extra_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        torch._dynamo.graph_break()
        self.extra_loss = h.mean()
        return self.b(h)


class Locked(breaking.TwoLayers):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.norm = threading.Lock(), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.b(self.norm(self.a(x)))


def pipeline(middle: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Linear(4, 4), middle(), nn.Linear(4, 4)]


def batch(seed: int = 0, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = rows * MICROBATCHES, 4
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The loss in float32; torch 2.11 cannot derive it from two dtypes."""
    return F.mse_loss(output.float(), target)


def trainer(modules: list[nn.Module], **options: Any) -> PipelineTrainer:
    options = {"ranks": 1, "microbatches": MICROBATCHES, "timeout": 60.0, **options}
    loss_fn = options.pop("loss_fn", squared_error)
    return PipelineTrainer(modules, loss_fn, sgd, **grouped(**options))


def plain_backward(
    modules: list[nn.Module], data: tuple[Tensor, Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Losses of the microbatches; the gradients of their mean are added to ``.grad``."""
    losses = []
    for x, y in zip(*(part.chunk(MICROBATCHES) for part in data), strict=True):
        for module in modules:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                x = module(x)
        loss = squared_error(x, y)
        torch.autograd.backward(loss / MICROBATCHES)
        losses.append(loss.detach())
    return torch.stack(losses)


def assert_same_state(mine: list[nn.Module], theirs: list[nn.Module]) -> None:
    state = nn.Sequential(*theirs).state_dict()
    for name, tensor in nn.Sequential(*mine).state_dict().items():
        assert torch.equal(tensor, state[name]), name


def assert_same_gradients(mine: list[nn.Module], theirs: list[nn.Module]) -> None:
    expected = dict(nn.Sequential(*theirs).named_parameters())
    for name, parameter in nn.Sequential(*mine).named_parameters():
        gradient, other = parameter.grad, expected[name].grad
        assert gradient is other or torch.equal(gradient, other), name


def partial_stage(module: nn.Module) -> PartialStage:
    stage = SplitStage(SplitOptions())(module, [torch.ones(2, 4, requires_grad=True)], index=3)
    assert isinstance(stage, PartialStage)
    return stage


@pytest.fixture(autouse=True)
def expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeferralWarning)
        # Dynamo instantiates autograd functions, and gives up where a warning is an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def test_steps_are_those_of_plain_autograd() -> None:
    mine, theirs = pipeline(Everything), pipeline(Everything)
    optimizer = sgd([*nn.Sequential(*theirs).parameters()])
    with trainer(mine, schedule="zb-h1") as engine:
        for rows in (2, 3, 2):
            expected = plain_backward(theirs, batch(rows, rows))
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(engine.step(batch(rows, rows)), expected)
        assert_same_state(mine, theirs)
        assert mine[1].rows == theirs[1].rows


@pytest.mark.parametrize("options", [{"autocast": torch.bfloat16}, {"accumulation": "auto"}])
@pytest.mark.parametrize("kind", [breaking.DisabledMiddle, Locked])
def test_gradients_are_those_of_plain_autograd(
    kind: type[nn.Module], options: dict[str, Any]
) -> None:
    mine, theirs = pipeline(kind), pipeline(kind)
    expected = plain_backward(theirs, batch(), options.get("autocast"))
    with trainer(mine, schedule="zb-h1", **options) as engine:
        assert torch.equal(engine.forward_backward(batch()), expected)
        assert_same_gradients(mine[1:2], theirs[1:2])
        assert_same_state(mine, theirs)


def test_a_loss_that_breaks_the_graph_has_parts() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.mse_loss(output, target)
        torch._dynamo.graph_break()
        return loss, {"half": loss / 2}

    modules = pipeline(breaking.TwoLayers)[::2]
    with trainer(modules, loss_fn=loss_fn) as engine:
        assert torch.equal(
            engine.step(batch()), plain_backward(pipeline(breaking.TwoLayers)[::2], batch())
        )
        assert engine.metrics()["half"] == pytest.approx(engine.metrics()["loss"] / 2)


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_function_with_a_parameter_that_no_optimizer_trains_is_refused(first: bool) -> None:
    head, uses_head = nn.Linear(4, 3, bias=False), [first]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return head(output).square().mean() if uses_head[0] else F.mse_loss(output, target)

    message = r"1 \(Linear\) or its loss_fn reads a trained tensor, float32\[3, 4\], .* module"
    with trainer([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=loss_fn) as engine:
        if not first:
            engine.step(batch())
        uses_head[0] = True
        with pytest.raises(PipelineError, match=message):
            engine.step(batch())


def double(seen: list[Tensor], gradient: Tensor) -> Tensor:
    seen.append(gradient.clone())
    return 2 * gradient


def test_hooks_see_each_microbatch_and_then_the_sum() -> None:
    mine, theirs = pipeline(Everything), pipeline(Everything)
    seen: dict[int, list[Tensor]] = {id(mine): [], id(theirs): []}
    sums: list[Tensor] = []
    for modules in (mine, theirs):
        modules[1].a.weight.register_hook(partial(double, seen[id(modules)]))
    mine[1].a.weight.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.clone()))
    plain_backward(theirs, batch())
    with trainer(mine) as engine:
        engine.forward_backward(batch())
    assert all(map(torch.equal, seen[id(mine)], seen[id(theirs)]))
    assert_same_gradients(mine, theirs)
    (total,) = sums
    assert torch.equal(total, theirs[1].a.weight.grad)


def test_microbatches_draw_the_same_numbers_in_any_schedule() -> None:
    gradients = []
    for schedule in ("gpipe", "zb-h1"):
        modules = pipeline(Dropping)
        with trainer(modules, schedule=schedule) as engine:
            torch.manual_seed(7)
            engine.forward_backward(batch())
        gradients.append([parameter.grad for parameter in modules[1].parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_warning_names_the_line_once() -> None:
    with warnings.catch_warnings(record=True) as issued, trainer(pipeline(Locked)) as engine:
        warnings.simplefilter("always")
        engine.step(batch())
        engine.step(batch(rows=3))
    (warning,) = [entry for entry in issued if entry.category is DeferralWarning]
    assert re.match(
        r"stage 1 \(Locked\) runs as several graphs.*\(at .*test_partial_stages\.py:\d+\)",
        str(warning.message),
    )


def test_weight_gradients_of_graphs_wait_for_w() -> None:
    module = breaking.DisabledMiddle()
    stage = partial_stage(module)
    stage.forward(0, [torch.ones(2, 4)])
    stage.backward_input(0, [torch.ones(2, 4)])
    with pytest.raises(SplitError, match="stage 3: weight gradients of microbatch 0 are pending"):
        stage.publish()
    assert stage.gradients.keys() == {"middle.weight", "middle.bias"}
    assert all(parameter.grad is None for parameter in module.parameters())
    stage.backward_weight(0)
    assert stage.gradients.keys() == {name for name, _ in module.named_parameters()}
    with pytest.raises(SplitError, match="microbatch 0 has not run forward, or its result"):
        stage.backward(0, [torch.ones(2, 4)])


def test_a_write_between_forward_and_backward_is_refused() -> None:
    module = breaking.DisabledMiddle()
    stage = partial_stage(module)
    stage.forward(0, [torch.ones(2, 4)])
    with torch.no_grad():
        module.b.weight.mul_(2)
    with pytest.raises(SplitError, match=r"written in place between .*: b\.weight"):
        stage.backward(0, [torch.ones(2, 4)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fullgraph": True}, r"breaking\.py:\d+"),
        ({"memory_limit": 10**9}, "can run as several graphs, but memory_limit needs one graph"),
    ],
)
def test_one_graph_may_be_required(options: dict[str, Any], message: str) -> None:
    with (
        trainer(pipeline(breaking.Printing), **options) as engine,
        pytest.raises(CaptureError, match=message),
    ):
        engine.step(batch())


def test_microbatches_of_different_sizes_have_the_bits_of_plain_autograd() -> None:
    mine, theirs = pipeline(Everything), pipeline(Everything)
    x, y = batch()
    pairs = [(x[:size], y[:size]) for size in (2, 4, 3)]
    for inputs, targets in pairs:
        (F.mse_loss(nn.Sequential(*theirs)(inputs), targets) / len(pairs)).backward()
    with trainer(mine) as engine:
        engine.forward_backward(microbatches=pairs)
        assert_same_gradients(mine, theirs)


def test_a_loss_in_an_attribute_is_refused() -> None:
    message = "needs a gradient in 'extra_loss'"
    with trainer(pipeline(LeavesLoss)) as engine, pytest.raises(PythonStateError, match=message):
        engine.step(batch())


def test_a_loss_in_a_named_attribute_is_trained() -> None:
    mine, theirs = pipeline(LeavesLoss), pipeline(LeavesLoss)
    for x, y in zip(*(part.chunk(MICROBATCHES) for part in batch()), strict=True):
        loss = F.mse_loss(nn.Sequential(*theirs)(x), y) + 0.5 * theirs[1].extra_loss
        torch.autograd.backward(loss / MICROBATCHES)
    with trainer(mine, aux_losses={"extra_loss": 0.5}) as engine:
        engine.forward_backward(batch())
        for one, other in zip(mine[1].parameters(), theirs[1].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@ranks(2)
def test_ranks_and_replicas_have_the_gradients_of_plain_autograd() -> None:
    for mesh, shares in (({"pp": 2}, 1), ({"pp": 1, "dp_replicate": 2}, 2)):
        mine = [pipeline(breaking.DisabledMiddle)[1], pipeline(Everything)[1]]
        theirs, *others = copies = [copy.deepcopy(mine) for _ in range(shares)]
        for share, modules in enumerate(copies):
            plain_backward(modules, batch(share))
        for modules in others:
            add_gradients(theirs, modules)
        options = {"ranks": None, "mesh": mesh_of(**mesh), "schedule": "zb-h1"}
        with trainer(mine, **options) as engine:
            engine.forward_backward(batch(dist.get_rank() % shares))
            for index, module in engine.modules.items():
                assert_same_gradients([module], [theirs[index]])


def add_gradients(modules: list[nn.Module], others: list[nn.Module]) -> None:
    """Set gradients to the mean of those of two copies."""
    parameters = (nn.Sequential(*copies).parameters() for copies in (modules, others))
    for one, other in zip(*parameters, strict=True):
        if one.grad is not None and other.grad is not None:
            one.grad.add_(other.grad).div_(2)
