"""A custom function's backward reads attributes of classes and modules when it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, SplitError, Stage

SCALE = 1.0


class MoEAuxLossAutoScaler(torch.autograd.Function):
    main_loss_backward_scale: Any = None

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        ctx.save_for_backward(aux_loss)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (aux_loss,) = ctx.saved_tensors
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grad_output, torch.ones_like(aux_loss) * scale

    @staticmethod
    def set_loss_scale(scale: float) -> None:
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale)
        else:
            MoEAuxLossAutoScaler.main_loss_backward_scale.fill_(scale)


class NumberScaler(torch.autograd.Function):
    scale: Any = 1.0

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, grad_output.new_full((), NumberScaler.scale)

    @classmethod
    def set_loss_scale(cls, scale: float) -> None:
        cls.scale = scale


class GlobalScaler(NumberScaler):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, grad_output.new_full((), SCALE)

    @classmethod
    def set_loss_scale(cls, scale: float) -> None:
        globals()["SCALE"] = scale


class BranchingScaler(NumberScaler):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, grad_output.new_full((), 2.0 if BranchingScaler.scale > 1 else 1.0)


class WeightScaler(torch.autograd.Function):
    """A product whose weight gradient is scaled: only W reads the scale."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad_output @ weight.T, (x.T @ grad_output) * WeightScaler.scale

    @classmethod
    def set_loss_scale(cls, scale: float) -> None:
        cls.scale = scale


class Experts(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(4, 2), nn.Linear(4, 4)
        self.function, self.of_weight = function, function is WeightScaler

    def forward(self, x: Tensor) -> Tensor:
        routes = self.router(x).softmax(-1)
        y = self.up(x) * routes[:, :1]
        other = self.up.weight if self.of_weight else routes.mean(0).square().sum()
        result: Tensor = self.function.apply(y, other)
        return result


FUNCTIONS = [MoEAuxLossAutoScaler, NumberScaler, GlobalScaler, WeightScaler]


def blocks(function: Any) -> nn.Module:
    function.set_loss_scale(1.0)
    return nn.Sequential(Experts(function), Experts(function)).double()


def assert_reads_late(function: Any, run: Any, model: nn.Module) -> None:
    """Every microbatch has a scale of its own, which it finds between forward and backward."""
    reference = copy.deepcopy(model)
    for step in range(2):
        for scale in (2.0, 3.0 + step):
            x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
            y = reference(x)
            backward = run(x)
            function.set_loss_scale(scale)
            y.sum().backward()
            backward()
            function.set_loss_scale(7.0)  # before W
    getattr(run, "finish", lambda: None)()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


class SplitRun:
    def __init__(self, model: nn.Module) -> None:
        self.model = autosplit.split(model, fullgraph=True)

    @property
    def captures(self) -> int:
        return len(self.model.functions)

    def __call__(self, x: Tensor) -> Callable[[], None]:
        y = self.model(x)
        return lambda: y.sum().backward()

    def finish(self) -> None:
        self.model.backward_weight()


class StageRun:
    def __init__(self, model: nn.Module) -> None:
        example = torch.ones(3, 4, dtype=torch.float64)
        self.stage, self.microbatch = Stage(model, [example], defer_whole_backward=True), -1

    @property
    def captures(self) -> int:
        return len(self.stage.captured)

    def __call__(self, x: Tensor) -> Callable[[], Any]:
        self.microbatch = at = self.microbatch + 1
        (y,) = self.stage.forward(at, [x.detach()])
        return lambda: self.stage.backward_input(at, [torch.ones_like(y)])

    def finish(self) -> None:
        for at in range(self.microbatch + 1):
            self.stage.backward_weight(at)
        self.stage.publish()


@pytest.mark.parametrize("run", [SplitRun, StageRun])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_value_set_before_the_backward_is_the_one_used(function: Any, run: Any) -> None:
    """And no value needs another capture."""
    model = blocks(function)
    running = run(model)
    assert_reads_late(function, running, model)
    assert running.captures == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_of_torch_compile_reads_late() -> None:
    model = blocks(MoEAuxLossAutoScaler)
    compiled = torch.compile(model, backend="autosplit")

    def run(x: Tensor) -> Callable[[], None]:
        y = compiled(x)
        return lambda: y.sum().backward()

    assert_reads_late(MoEAuxLossAutoScaler, run, model)


@pytest.mark.parametrize("value", [None, True])
def test_other_values_are_refused_with_the_line(value: Any) -> None:
    model = blocks(NumberScaler)
    NumberScaler.scale = value
    with pytest.raises(CaptureError, match=rf"test_backward_reads\.py:\d+: .*scale = {value!r}"):
        autosplit.split(model, (torch.ones(3, 4, dtype=torch.float64),), fullgraph=True)


@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0)])
def test_the_cure_for_a_class_in_a_function_is_the_top_level(value: Any) -> None:
    class Local(NumberScaler):
        scale = value

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            return grad_output, grad_output.new_ones(()) * Local.scale

    model = nn.Sequential(Experts(Local)).double()
    with pytest.raises(CaptureError, match="Define the class Local at the top level") as caught:
        autosplit.split(model, (torch.ones(3, 4, dtype=torch.float64),), fullgraph=True)
    assert "Set it to a number" not in str(caught.value)
    # A context cannot keep such a tensor.
    assert ("ctx.scale = Local.scale" in str(caught.value)) == isinstance(value, float)


def test_a_branch_on_a_number_is_refused() -> None:
    model = blocks(BranchingScaler)
    with pytest.raises(CaptureError, match=r"cannot branch on numbers.*ctx\.scale"):
        autosplit.split(model, (torch.ones(3, 4, dtype=torch.float64),), fullgraph=True)


def test_a_value_of_another_kind_in_the_backward_is_refused() -> None:
    y = autosplit.split(blocks(NumberScaler), fullgraph=True)(torch.ones(3, 4).double())
    NumberScaler.scale = torch.ones(2)
    with pytest.raises(SplitError, match=r"reads NumberScaler\.scale.*shape \[\].*now tensor"):
        y.sum().backward()


class Held(torch.autograd.Function):
    """Its forward keeps a tensor of the class for the backward."""

    scale = torch.tensor(2.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = Held.scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = grad * ctx.scale
        return result


def test_a_tensor_of_a_class_may_be_kept_by_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, requires_grad=True)
    model = autosplit.split(Applied(), fullgraph=True)
    for scale, graphs in ((2.0, 1), (3.0, 2)):
        monkeypatch.setattr(Held, "scale", torch.tensor(scale))
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        assert gradient.tolist() == [scale] * 2
        assert len(model.functions) == graphs
    output = model(x)
    Held.scale.fill_(4.0)
    with pytest.raises(SplitError, match=r"written in place between .*Held.*scale"):
        output.sum().backward()


class Applied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Held.apply(x)  # type: ignore[no-untyped-call]
        return result
