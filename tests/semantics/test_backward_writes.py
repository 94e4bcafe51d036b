"""Writes of a backward: W adds to sums, I writes other state, both as plain autograd does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, DeferralWarning, PipelineTrainer, SplitError
from tests.autograd.faces import Compiled
from tests.semantics.against_autograd import assert_alike, assert_equals_autograd, assert_same

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning"  # by Dynamo, in parts
    ),
    pytest.mark.filterwarnings("ignore::autosplit.errors.DeferralWarning"),
]
_Function: Any = torch.autograd.Function


class _IntoSum(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        result = g @ weight
        with torch.no_grad():
            ctx.total.add_(g.t() @ x)
        return result, None, None


class _Scaled(_Function):
    """A history of scales, which forward and backward read and write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor) -> Tensor:
        ctx.history = history
        history[1] = x.abs().max()
        return x * (1 + history[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        scale = 1 + ctx.history[0]
        ctx.history[0] = g.abs().max()
        return g * scale, None


class _Largest(_Function):
    """The largest gradients of the latest backwards, which the forward does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor) -> Tensor:
        ctx.history = history
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        ctx.history.copy_(torch.roll(ctx.history, 1))
        ctx.history[0] = g.abs().max()
        return g, None


class _Overwriting(_Function):
    """Writes that are no sums, although operators that can add make them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, history: Tensor, total: Tensor) -> Tensor:
        ctx.kind, ctx.history, ctx.total = kind, history, total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        match ctx.kind:
            case "copied":
                ctx.history.copy_(g.abs().max())
            case "assigned":
                ctx.total[torch.tensor([1, 3]), torch.tensor([0, 2])] = g[:2, 0]
            case "averaged":
                ctx.total.addmm_(g.t(), g, beta=0.9, alpha=0.1)
        return g, None, None, None


class _Counted(_Function):
    """A number of backwards, and a sum of vectors, which are as small in I as in W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor, total: Tensor) -> Tensor:
        ctx.count, ctx.total = count, total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        ctx.count.add_(1)
        ctx.total.add_(g.sum(0))
        return g, None, None


class _MainGrad(_Function):
    """Megatron's fused accumulation: the weight has no gradient, and its ``main_grad`` a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        weight.main_grad.addmm_(g.t(), x)
        return g @ weight, None


@torch.library.custom_op("autosplit_tests::add_product", mutates_args={"total"})
def add_product(g: Tensor, x: Tensor, total: Tensor) -> None:
    total.add_(g.t() @ x)


class _ByOperator(_IntoSum):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        add_product(g.contiguous(), x, ctx.total)
        return g @ weight, None, None


class Shared:
    total = torch.zeros(8, 8)


class _IntoClass(_MainGrad):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        Shared.total.add_(g.t() @ x)
        return g @ weight, None


class Writer(nn.Module):
    """Two linear layers around something that writes in its backward."""

    def __init__(self, kind: str, breaks: bool = False, size: int = 8) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(size, size), nn.Linear(size, size)
        self.weight = nn.Parameter(torch.randn(size, size))
        self.register_buffer("total", torch.zeros(size, size))
        self.register_buffer("history", torch.zeros(2))
        self.kind, self.breaks = kind, breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.after(torch.relu(KINDS[self.kind](self, h)))


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda m, h: _IntoSum.apply(h, m.weight, m.total),
    "history": lambda m, h: _Scaled.apply(h, m.history),
    "largest": lambda m, h: _Largest.apply(h, m.history),
    "operator": lambda m, h: _ByOperator.apply(h, m.weight, m.total),
    "count": lambda m, h: _Counted.apply(h, m.history, m.total),
    "attribute": lambda m, h: _IntoSum.apply(h, m.weight, m.weight.main_grad),
    "parameter": lambda m, h: _IntoSum.apply(h, m.weight.detach(), m.weight),
    "class": lambda m, h: _IntoClass.apply(h, m.weight),
    "twice": lambda m, h: _IntoSum.apply(_IntoSum.apply(h, m.weight, m.total), m.weight, m.total),
}
OVERWRITING = ["copied", "assigned", "averaged"]
KINDS |= {
    kind: lambda m, h: _Overwriting.apply(h, m.kind, m.history, m.total) for kind in OVERWRITING
}
REFUSED = ["parameter", "class"]


class Blocks(nn.Module):
    """Repeated blocks, each with a ``main_grad`` and a history."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("history", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        h = _Largest.apply(_MainGrad.apply(x, self.weight), self.history)
        return torch.relu(self.inner(h))


def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(6, 8),) for _ in range(3)]


def with_main_grads(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "weight") and not isinstance(module, nn.Linear):
            module.weight.main_grad = torch.zeros(8, 8)
    return model


def written(model: nn.Module) -> dict[str, Tensor]:
    sums = {n: p.main_grad for n, p in model.named_parameters() if hasattr(p, "main_grad")}
    return {**dict(model.named_buffers()), **sums}


KEPT = ["sum", "history", "largest", "operator", "twice", "count"]
BROKEN = ["sum", "history", "operator"]  # deferred, written by I, and by an operator of its own


@pytest.mark.parametrize(
    ("kind", "breaks"),
    [*((kind, False) for kind in KEPT), *((kind, True) for kind in BROKEN)],
)
def test_split(kind: str, breaks: bool) -> None:
    split = assert_equals_autograd(Writer(kind, breaks), batches())
    assert breaks or "Deferred: 100.0 %" in split.report()


@pytest.mark.parametrize("kind", OVERWRITING)
def test_input_gradients_overwrite_state_in_the_order_of_plain_autograd(kind: str) -> None:
    model = Writer(kind)
    plain = copy.deepcopy(model)
    split = autosplit.split(model, max_pending=math.inf)
    for (x,) in batches():
        for module in (split, plain):
            module(x).square().sum().backward()
        assert_same("written before any W", written(model), written(plain))
    assert not split.functions[-1].sums


def test_inductor() -> None:
    torch._dynamo.reset()
    model = with_main_grads(Blocks())
    plain = with_main_grads(copy.deepcopy(model))
    split = autosplit.split(model, backend="inductor")
    for batch in batches():
        for module in (split, plain):
            module(*batch).square().sum().backward()
    split.backward_weight()
    for name, value in written(plain).items():
        torch.testing.assert_close(written(model)[name], value)


def test_lean_memory_moves_no_sum_into_i() -> None:
    split = assert_equals_autograd(Writer("sum"), batches(), memory="lean")
    assert split.functions[-1].sums == ["total"]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attribute": lambda: Writer("attribute"),
    "twice": lambda: Writer("twice"),
    "blocks": Blocks,
}
ORDER = "F0 F1 I0 F2 I1 W0 I2 F3 W1 W2 B3"


@pytest.mark.parametrize(
    ("kind", "check"), [("attribute", "0"), ("twice", "0"), ("blocks", "0"), ("blocks", "1")]
)
def test_stages_in_the_order_of_a_pipeline(
    kind: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSPLIT_CHECK", check)
    model = MODELS[kind]()
    plain = with_main_grads(copy.deepcopy(model))
    inputs = [torch.randn(6, 8) for _ in range(4)]
    stage = autosplit.Stage(with_main_grads(model), (inputs[0].clone().requires_grad_(),))
    for action, at in ORDER.split():
        microbatch, gradient = int(at), [torch.full((6, 8), float(at) + 1)]
        match action:
            case "F":
                stage.forward(microbatch, [inputs[microbatch].clone()])
            case "I":
                stage.backward_input(microbatch, gradient)
            case "W":
                sums = [value for name, value in written(model).items() if "history" not in name]
                assert microbatch or not any(value.any() for value in sums)
                stage.backward_weight(microbatch)
            case "B":
                stage.backward(microbatch, gradient)
    stage.publish()
    for microbatch, x in enumerate(inputs):
        plain(x.clone().requires_grad_()).backward(torch.full((6, 8), microbatch + 1.0))
    assert_same("written", written(model), written(plain))
    grads = [[parameter.grad for parameter in m.parameters()] for m in (model, plain)]
    assert_same("gradients", *grads)


def test_trainer() -> None:
    modules = {at: with_main_grads(_Block()) for at in range(2)}
    plain = {at: with_main_grads(copy.deepcopy(module)) for at, module in modules.items()}
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with PipelineTrainer(
        modules.__getitem__, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, 0.0),
        stages=2, microbatches=4, ranks=1, schedule="zb-h1",
    ) as trainer:  # fmt: skip
        trainer.step(x, target=y)
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(plain[1](plain[0](a)), b) / 4).backward()
    for at, module in modules.items():
        assert_same("written", written(module), written(plain[at]))


def test_a_sum_that_the_user_clears_before_w_is_refused() -> None:
    model = with_main_grads(Writer("attribute"))
    split = autosplit.split(model, max_pending=math.inf)
    with pytest.warns(DeferralWarning, match=r"adds into weight\.main_grad.*before you read"):
        split(torch.randn(6, 8)).sum().backward()
    model.weight.main_grad.zero_()
    with pytest.raises(SplitError, match=r"one of weight\.main_grad\. Call backward_weight"):
        split.backward_weight()


def test_an_optimizer_step_and_a_cleared_gradient_lose_no_sum() -> None:
    model = with_main_grads(Writer("attribute"))
    plain = with_main_grads(copy.deepcopy(model))
    split = autosplit.split(model, max_pending=math.inf)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # Megatron steps copies in float32
    for module in (split, plain):
        module(torch.ones(6, 8)).sum().backward()
        module.zero_grad()
    other.step()
    assert_same("main_grad", model.weight.main_grad, plain.weight.main_grad)


def test_a_main_grad_may_be_replaced_between_steps() -> None:
    model = with_main_grads(Writer("attribute"))
    split = autosplit.split(model, (torch.ones(6, 8),))
    split(torch.ones(6, 8)).sum().backward()
    split.backward_weight()
    first = model.weight.main_grad
    model.weight.main_grad = torch.zeros(8, 8)
    split(torch.ones(6, 8)).sum().backward()
    split.backward_weight()
    assert_same("main_grad", model.weight.main_grad, first)
    assert len(split.functions) == 1


@pytest.mark.parametrize("kind", ["sum", "history", "operator", "attribute", "averaged", "class"])
def test_under_torch_compile(kind: str) -> None:
    torch._dynamo.reset()
    inputs, model = batches(), Writer(kind)

    def drive(call: Any, model: Any) -> None:
        model.weight.main_grad = torch.zeros(8, 8)  # as Megatron has it
        Shared.total.zero_()
        for batch in inputs:
            call(*batch).square().sum().backward()
        call.backward_weight() if call is not model else None
        return [model.weight, model.weight.main_grad, Shared.total.clone()]

    assert_alike(model, drive, face=Compiled)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_targets_are_refused_with_the_line(kind: str) -> None:
    message = r"writes into (parameter 'weight'|Shared.total) \(from"
    # Dynamo of torch 2.11 refuses the write itself.
    message += r"|at .*test_backward_writes.py:\d+\n.* a leaf Variable that requires grad"
    with pytest.raises(CaptureError, match=message):
        autosplit.Stage(Writer(kind), batches()[0])


class Counted(torch.autograd.Function):
    """A linear layer whose backward counts its calls, and adds a transposed product to a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, count: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, count, total)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, count, total = ctx.saved_tensors
        count.add_(1)
        total.add_((x.t() @ grad).t())
        return grad @ weight, grad.t() @ x, None, None


class CountedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(600))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(600, 600))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Counted.apply(x, self.weight, self.count, self.total)  # type: ignore[no-untyped-call]
        return output


@pytest.mark.filterwarnings("ignore::autosplit.DeferralWarning")
@pytest.mark.parametrize("accumulation", ["fused", "auto"])
def test_gradients_that_add_themselves_leave_the_users_sums_as_they_are(accumulation: Any) -> None:
    plain = CountedLinear()
    model = copy.deepcopy(plain)
    split = autosplit.split(model, accumulation=accumulation, max_pending=3)
    for _ in range(3):
        x = torch.randn(4, 600)
        plain(x).sum().backward()
        split(x).sum().backward()
    split.backward_weight()
    assert plain.count == model.count == 3
    assert torch.equal(plain.total, model.total)
    assert torch.allclose(plain.weight.grad, model.weight.grad)  # type: ignore[arg-type]
