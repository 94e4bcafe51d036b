"""Operators with formulas of their own, and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.autograd.function import once_differentiable

import autosplit
from autosplit import CaptureError, SplitError
from tests.semantics.against_autograd import assert_equals_autograd, leaves
from tests.zoo import layered

# --- ``autograd.Function`` and ``torch.library`` operators with formulas of their own -------------
# The formulas are wrong on purpose, so that a gradient shows which one was used.


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * x * grad * ctx.factor, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = grad @ weight.t() * 3 if ctx.needs_input_grad[0] else None
        to_weight = x.t() @ grad * 5 if ctx.needs_input_grad[1] else None
        return to_x, to_weight


class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] * 7


class Split(torch.autograd.Function):
    """Says which of its gradients there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None:
            return None if second is None else second * 7
        return first * 5 if second is None else first * 2 + second * 3


class Fills(torch.autograd.Function):
    """Writes its result, and its gradient, into memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(x.contiguous() * 2).neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad).copy_(grad * 5)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 11


@torch.library.custom_op("autosplit_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


@torch.library.custom_op("autosplit_tests::cube_backward", mutates_args=())
def cube_backward(grad: Tensor, x: Tensor) -> Tensor:
    return 5 * x * x * grad


@torch.library.custom_op("autosplit_tests::without_formula", mutates_args=())
def without_formula(x: Tensor) -> Tensor:
    return x * 2


cube.register_fake(torch.empty_like)
cube_backward.register_fake(lambda grad, x: torch.empty_like(x))
without_formula.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: cube_backward(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "straight through": lambda m, x: StraightThrough.apply(m.linear(x)),
    "saved and number": lambda m, x: Square.apply(m.linear(x), 2.0),
    "two gradients": lambda m, x: Product.apply(x, m.linear.weight),
    "setup_context": lambda m, x: Setup.apply(m.linear(x)),
    "one of two outputs": lambda m, x: Split.apply(m.linear(x))[0],
    "both outputs": lambda m, x: sum(Split.apply(m.linear(x))),
    "own memory": lambda m, x: m.linear(Fills.apply(m.linear(x)).tanh()),
    "in place": lambda m, x: Dirty.apply(m.linear(x) * 3),
    "custom op": lambda m, x: m.linear(cube(m.linear(x))),
}


IN_PARTS = ("one of two outputs", "both outputs", "in place")


def together(cases: dict[str, Callable[[Any, Tensor], Any]]) -> nn.Module:
    """A model that returns what each of the cases does, by its name."""
    return layered(lambda m, x: {name: case(m, x) for name, case in cases.items()})


# Dynamo makes an instance to trace the context.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_formulas_are_used_in_one_graph() -> None:
    cases = {name: case for name, case in CASES.items() if name not in IN_PARTS}
    assert_equals_autograd(together(cases), leaves(3, 4), fullgraph=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "needs"), [*((name, True) for name in IN_PARTS), ("two gradients", False)]
)
def test_custom_functions_equal_autograd(name: str, needs: bool) -> None:
    batch = [(torch.randn(3, 4).requires_grad_(needs),) for _ in range(2)]
    assert_equals_autograd(layered(CASES[name]), batch)


def test_operator_without_a_formula_is_refused() -> None:
    split = autosplit.split(layered(lambda m, x: without_formula(m.linear(x))))
    with pytest.raises(CaptureError, match="no autograd formula was registered"):
        split.capture(torch.randn(2, 4))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_gradients_that_may_be_absent_are_refused() -> None:
    """Dynamo traces the backward as if every gradient was there."""

    def first_of_two(module: Any, x: Tensor) -> Tensor:
        h = StraightThrough.apply(module.linear(x))
        return Split.apply(h)[0]

    model = layered(first_of_two)
    expected = (
        r"set_materialize_grads\(False\), at .*test_custom_ops.py:\d+ return Split\.apply\(h\)"
        r".*torch.compiler.disable"
    )
    with pytest.raises(CaptureError, match=expected):
        autosplit.split(model, fullgraph=True, max_pending=math.inf)(torch.randn(2, 4))
    compiled = torch.compile(model, backend="autosplit", fullgraph=True)
    with pytest.raises(BackendCompilerFailed, match=expected):
        compiled(torch.randn(2, 4))


# --- random operators: same numbers as autograd for the same seed, drawn once ---------------------


def stochastic_depth(module: Any, x: Tensor) -> Tensor:
    keep = torch.empty(x.shape[0], 1).bernoulli_(0.5) / 0.5
    return x + module.linear(x) * keep


def attention(module: Any, x: Tensor) -> Tensor:
    q = module.linear(x).unsqueeze(0)
    return F.scaled_dot_product_attention(q, q, x.unsqueeze(0), dropout_p=0.5)


def unread(module: Any, x: Tensor) -> Tensor:
    """Random numbers that nobody reads are drawn nevertheless, before the mask."""
    torch.rand(3)
    h = module.linear(x)
    F.dropout(h, 0.5)
    return F.dropout(h, 0.5)


RANDOM: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout 0.3": lambda m, x: F.dropout(m.linear(x), 0.3),
    "alpha dropout": lambda m, x: F.alpha_dropout(m.linear(x), 0.5, True),
    "rrelu": lambda m, x: F.rrelu(m.linear(x), training=True),
    "noise": lambda m, x: m.linear(x) + torch.randn_like(x),
    "gumbel softmax": lambda m, x: F.gumbel_softmax(m.linear(x), hard=True),
    "multinomial": lambda m, x: m.linear(x)[torch.multinomial(torch.ones(20), 5)],
    "permutation": lambda m, x: m.linear(x)[torch.randperm(20)],
    "stochastic depth": stochastic_depth,
    "attention dropout": attention,
    "unread": unread,
}


def test_random_numbers_are_those_of_autograd() -> None:
    """Drawn in the order of the operators."""
    assert_equals_autograd(together(RANDOM), leaves(20, 4), fullgraph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_rounds_its_noise(dtype: torch.dtype) -> None:
    """1 / (1 - 0.1) is no number of half precision."""
    model = layered(lambda m, x: F.dropout(m.linear(x), 0.1)).to(dtype)
    assert_equals_autograd(model, [(torch.randn(20, 4, dtype=dtype).requires_grad_(),)] * 2)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand(4)


# Dynamo makes an instance to trace the context.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("last", [True, False], ids=["last", "before a dropout"])
def test_a_custom_backward_draws_the_masks_that_autograd_draws(last: bool) -> None:
    """Drawn in the forward, they would be other masks."""

    def make(module: Any, x: Tensor) -> Tensor:
        h = NoisyGradient.apply(F.dropout(module.linear(x), 0.5))
        return h if last else F.dropout(h, 0.5)

    batch = leaves(20, 4)
    split = assert_equals_autograd(layered(make), batch)
    assert "draws random numbers in the backward" in split.report()
    whole = autosplit.split(layered(make), fullgraph=True)
    with pytest.raises(SplitError, match=r"\(from .*test_custom_ops.py:\d+.*and save them"):
        whole(*batch[0])


PYTHON: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "numpy number": lambda: float(np.random.rand()),
    "numpy array": lambda: torch.from_numpy(np.random.rand(4).astype(np.float32)),
}


@pytest.mark.parametrize("name", PYTHON)
def test_numbers_of_python_and_numpy_are_drawn_anew_in_each_call(name: str) -> None:
    """The capture draws none of them, and no graph holds them."""
    draw = PYTHON[name]
    model = layered(lambda m, x: m.linear(x) * draw())
    assert_equals_autograd(model, leaves(20, 4))
    with pytest.raises(CaptureError):
        autosplit.split(model, (torch.randn(2, 4),), fullgraph=True)


def test_a_random_generator_kept_by_the_module_is_refused() -> None:
    """Plain ``torch.compile`` would multiply by the same number for ever."""
    model = layered(lambda m, x: m.linear(x) * m.generator.random())
    model.generator = random.Random(0)
    split = autosplit.split(nn.Sequential(model))
    with pytest.raises(CaptureError, match=r"keeps a random.Random as '0.generator', whose"):
        split(torch.randn(2, 4))


@pytest.mark.parametrize("draw", [random.random, lambda: float(torch.rand(()))], ids=["py", "t"])
def test_python_branch_on_a_random_number_is_refused(draw: Callable[[], float]) -> None:
    """Drawn once at the capture it would be a constant."""
    model = layered(lambda m, x: m.linear(x) if draw() < 0.5 else x)
    split = autosplit.split(model)
    with pytest.raises(CaptureError, match=r"cannot be captured in one graph"):
        split.capture(torch.randn(2, 4))
