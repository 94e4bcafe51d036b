"""What a forward returns."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autosplit
from tests.semantics.against_autograd import assert_equals_autograd, within

# --- what a forward may return: other objects, aliases, views, several outputs --------------------


Pair = namedtuple("Pair", ["a", "b"])


class Returns(nn.Module):
    """Two linear layers and whatever ``make`` makes of them."""

    def __init__(self, make: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self, x)


def batches(*shape: int) -> list[tuple[Tensor]]:
    return [(torch.randn(shape).requires_grad_(),) for _ in range(2)]


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "namedtuple": lambda m, x: Pair(m.first(x), m.second(x)),
    "nested": lambda m, x: OrderedDict(a=m.first(x), b=[m.second(x), 3, "s", None]),
    "parameter": lambda m, x: (m.first(x), m.first.weight),
    "parameter only": lambda m, x: m.first.weight * 2,
    "input": lambda m, x: (m.first(x), x),
    "input only": lambda m, x: x,
    "constant": lambda m, x: (m.first(x), torch.ones(2)),
    "detached": lambda m, x: (m.first(x), m.second(x).detach()),
    "not differentiable": lambda m, x: (m.first(x), m.second(x).argmax(-1), m.first(x) > 0),
    "view": lambda m, x: m.first(x).view(-1),
    "chunks": lambda m, x: m.first(x).chunk(2, -1),
}
OVERLAPPING: dict[str, Callable[[Any, Tensor], Any]] = {
    "unfold": lambda m, x: m.first(x).unfold(1, 2, 1),
    "as_strided": lambda m, x: m.first(x).as_strided((3, 3, 2), (4, 1, 1)),
    "beside its base": lambda m, x: (m.first(x), m.first(x).unfold(0, 2, 1)),
    "expand": lambda m, x: m.first(x)[:, None].expand(3, 2, 4),
}
# Outputs whose gradients are zeros, or none, whatever the gradient that arrives.
FLAT: dict[str, Callable[[Any, Tensor], Any]] = {
    "angle": lambda m, x: m.first(x).angle(),
    "sgn": lambda m, x: m.first(x).sgn(),
    "copysign": lambda m, x: torch.copysign(torch.ones(3, 4), m.first(x)),
    "nonzero count": lambda m, x: torch.linalg.vector_norm(m.first(x), ord=0),
    "nothing": lambda m, x: torch.cat([m.first(x)[:0], m.second(x)[:0]]),
    "empty determinant": lambda m, x: torch.linalg.det(m.first(x)[:0, :0]),
    "beside another": lambda m, x: (m.first(x).sgn(), m.second(x)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(name: str) -> None:
    assert_equals_autograd(Returns(CASES[name]), batches(3, 4))


@pytest.mark.parametrize("name", FLAT)
def test_gradient_that_depends_on_nothing(name: str) -> None:
    """``requires_grad`` as in autograd, and its gradients of zeros."""
    model, batch = Returns(FLAT[name]), batches(3, 4)
    expected = [leaf.requires_grad for leaf in pytree.tree_leaves(model(*batch[0]))]
    split = assert_equals_autograd(model, batch, fullgraph=True)
    assert [leaf.requires_grad for leaf in pytree.tree_leaves(split(*batch[0]))] == expected


def test_stage_of_a_gradient_that_depends_on_nothing() -> None:
    model = Returns(FLAT["nonzero count"])
    stage = autosplit.Stage(model, (torch.randn(3, 4, requires_grad=True),))
    assert [differentiable for *_, differentiable in stage.output_specs] == [True]
    for microbatch in (0, 1):
        stage.forward(microbatch, [torch.randn(3, 4)])
    assert stage.backward_input(0, [torch.ones(())]) == [None]
    stage.backward_weight(0)
    assert stage.backward(1, [torch.ones(())]) == [None]
    stage.publish()
    assert model.first.weight.grad is None


def all_different(output: Any) -> Tensor:
    """A loss whose gradient has no two elements equal."""
    leaves = pytree.tree_leaves(output)
    return sum((leaf * torch.arange(leaf.numel()).view(leaf.shape)).sum() for leaf in leaves)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_output_that_overlaps_itself(name: str) -> None:
    model = Returns(OVERLAPPING[name])
    assert_equals_autograd(model, batches(3, 4), all_different, fullgraph=True)


@pytest.mark.parametrize("options", [{"backend": "inductor"}, {"dynamic": True}], ids=str)
def test_output_that_overlaps_itself_compiled_and_in_parts(options: dict[str, Any]) -> None:
    """torch.compile's own gradients of these are wrong."""
    model, near = Returns(OVERLAPPING["unfold"]), within(2e-6)
    assert_equals_autograd(model, batches(3, 4), all_different, compare=near, **options)


def test_stage_whose_example_overlaps_itself() -> None:
    """No other microbatch can be laid out as the example is."""
    model = nn.Linear(2, 2)
    example = torch.randn(3, 4).unfold(1, 2, 1).requires_grad_()
    stage = autosplit.Stage(model, (example,))
    x = torch.randn(3, 3, 2)
    (output,) = stage.forward(0, [x.clone()])
    assert torch.equal(output, model(x))
    stage.backward(0, [torch.ones_like(output)])
    stage.publish()
    assert torch.equal(model.weight.grad, torch.autograd.grad(model(x).sum(), model.weight)[0])


def twice(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = module.first(x)
    return y, y, y[0], y.t()


def test_outputs_that_alias_each_other() -> None:
    assert_equals_autograd(Returns(twice), batches(3, 4))


def test_model_output_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    kind = outputs.BaseModelOutput
    model = Returns(lambda m, x: kind(last_hidden_state=m.first(x)))
    split = assert_equals_autograd(model, batches(3, 4), lambda o: o.last_hidden_state.sum())
    assert type(split(torch.randn(3, 4))) is kind


@pytest.mark.parametrize(
    ("name", "shape"),
    [("view", (3, 4)), ("view", (2, 3, 4)), ("input", (3, 4)), ("chunks", (2, 3, 4))],
)
def test_outputs_may_be_written_into(name: str, shape: tuple[int, ...]) -> None:
    """A custom autograd function that returns views would forbid it; autograd does not."""
    model = Returns(CASES[name])
    split = autosplit.split(model)
    x = torch.randn(shape, requires_grad=True)
    for _ in range(2):
        output = split(x)
        first = output if isinstance(output, Tensor) else next(iter(_tensors(output)))
        first.mul_(2.0)
        first.sum().backward()
    split.backward_weight()
    mine, x.grad = x.grad, None
    grad = model.first.weight.grad
    model.zero_grad()
    for _ in range(2):
        output = model(x)
        first = output if isinstance(output, Tensor) else next(iter(_tensors(output)))
        (first * 2.0).sum().backward()
    assert torch.equal(mine, x.grad)
    assert torch.equal(grad, model.first.weight.grad)


def _tensors(output: Any) -> Any:
    return output.values() if isinstance(output, dict) else output


def test_output_that_was_saved_and_is_written_is_refused() -> None:
    split = autosplit.split(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sigmoid()))
    output = split(torch.randn(3, 4))
    output.mul_(2.0)
    with pytest.raises(autosplit.SplitError, match="written in place between the forward"):
        output.sum().backward()


class Apart(nn.Module):
    """Two outputs, each of an input of its own; the second input is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(y.mul(2).mul_(3))


def test_input_without_a_part_in_the_loss_has_no_gradient() -> None:
    """None as in autograd, not zeros."""
    microbatches = [tuple(torch.randn(3, 4).requires_grad_() for _ in range(2)) for _ in range(2)]
    model = Apart()
    for used in (0, 1):
        assert_equals_autograd(model, microbatches, lambda output, at=used: output[at].sum())


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(y)


def test_overwritten_input_that_nobody_reads_has_no_gradient() -> None:
    split = autosplit.split(Overwrites(), fullgraph=True)
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    for leaf in leaves:
        split(leaf.clone(), leaf).sum().backward()
    y_only = [leaf.grad for leaf in leaves]
    split.backward_weight()
    expected = torch.ones(3, 4) @ split.model.linear.weight
    assert all(torch.equal(grad, expected) for grad in y_only)
    x = torch.randn(3, 4, requires_grad=True)
    split(x.clone(), torch.randn(3, 4)).sum().backward()
    assert x.grad is None


# --- views of parameters and inputs as results, alone or beside others ----------------------------


VIEWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mT alone": lambda own, x: own.weight.mT,
    "T alone": lambda own, x: own.weight.T,
    "behind another": lambda own, x: (own.layer(x), own.weight.mT),
    "before another": lambda own, x: (own.weight.H, own.layer(x)),
    "of the input": lambda own, x: (own.layer(x), x.mT),
    "computed with": lambda own, x: (own.layer(x), own.weight.T * 2),
}


class Returning(nn.Module):
    def __init__(self, view: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.layer = nn.Linear(4, 4)
        self.view = view

    def forward(self, x: Tensor) -> Any:
        return self.view(self, x)


@pytest.mark.parametrize("name", VIEWS)
def test_returned(name: str) -> None:
    batch = [(torch.randn(2, 4, requires_grad=True),) for _ in range(2)]
    split = assert_equals_autograd(Returning(VIEWS[name]), batch, fullgraph=True)
    assert len(split.functions) == 1
