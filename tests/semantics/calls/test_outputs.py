"""Outputs of a forward: structures, views, inputs and values without gradients."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autosplit
from tests.semantics.against_autograd import assert_equals_autograd, leaves, within
from tests.zoo import layered

# --- what a forward may return: other objects, aliases, views, several outputs --------------------


Pair = namedtuple("Pair", ["a", "b"])


def aliases(y: Tensor) -> tuple[Tensor, ...]:
    return y, y, y[0], y.t()


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "namedtuple": lambda m, x: Pair(m.linear(x), m.second(x)),
    "nested": lambda m, x: OrderedDict(a=m.linear(x), b=[m.second(x), 3, "s", None]),
    "parameter": lambda m, x: (m.linear(x), m.linear.weight),
    "parameter only": lambda m, x: m.linear.weight * 2,
    "input": lambda m, x: (m.linear(x), x),
    "input only": lambda m, x: x,
    "constant": lambda m, x: (m.linear(x), torch.ones(2)),
    "detached": lambda m, x: (m.linear(x), m.second(x).detach()),
    "not differentiable": lambda m, x: (m.linear(x), m.second(x).argmax(-1), m.linear(x) > 0),
    "view": lambda m, x: m.linear(x).view(-1),
    "chunks": lambda m, x: m.linear(x).chunk(2, -1),
    "aliases": lambda m, x: aliases(m.linear(x)),
    "mT alone": lambda m, x: m.second.weight.mT,
    "T alone": lambda m, x: m.second.weight.T,
    "behind another": lambda m, x: (m.linear(x), m.second.weight.mT),
    "before another": lambda m, x: (m.second.weight.H, m.linear(x)),
    "of the input": lambda m, x: (m.linear(x), x.mT),
    "computed with": lambda m, x: (m.linear(x), m.second.weight.T * 2),
}
OVERLAPPING: dict[str, Callable[[Any, Tensor], Any]] = {
    "unfold": lambda m, x: m.linear(x).unfold(1, 2, 1),
    "as_strided": lambda m, x: m.linear(x).as_strided((3, 3, 2), (4, 1, 1)),
    "beside its base": lambda m, x: (m.linear(x), m.linear(x).unfold(0, 2, 1)),
    "expand": lambda m, x: m.linear(x)[:, None].expand(3, 2, 4),
}
# Outputs whose gradients are zeros, or none, whatever the gradient that arrives.
FLAT: dict[str, Callable[[Any, Tensor], Any]] = {
    "angle": lambda m, x: m.linear(x).angle(),
    "sgn": lambda m, x: m.linear(x).sgn(),
    "copysign": lambda m, x: torch.copysign(torch.ones(3, 4), m.linear(x)),
    "nonzero count": lambda m, x: torch.linalg.vector_norm(m.linear(x), ord=0),
    "nothing": lambda m, x: torch.cat([m.linear(x)[:0], m.second(x)[:0]]),
    "empty determinant": lambda m, x: torch.linalg.det(m.linear(x)[:0, :0]),
    "beside another": lambda m, x: (m.linear(x).sgn(), m.second(x)),
}


# Each has something that other results would hide.
ALONE = (
    "parameter only",
    "input only",
    "input",
    "mT alone",
    "T alone",
    "before another",
    "aliases",
)


def together(model: Any, x: Tensor) -> dict[str, Any]:
    return {name: case(model, x) for name, case in CASES.items() if name not in ALONE}


@pytest.mark.parametrize(
    "forward", [*map(CASES.__getitem__, ALONE), together], ids=[*ALONE, "the others together"]
)
def test_equals_autograd(forward: Callable[[Any, Tensor], Any]) -> None:
    split = assert_equals_autograd(layered(forward), leaves(3, 4), fullgraph=True)
    assert len(split.functions) == 1


@pytest.mark.parametrize("name", FLAT)
def test_gradient_that_depends_on_nothing(name: str) -> None:
    """``requires_grad`` as in autograd, and its gradients of zeros."""
    model, batch = layered(FLAT[name]), leaves(3, 4)
    expected = [leaf.requires_grad for leaf in pytree.tree_leaves(model(*batch[0]))]
    split = assert_equals_autograd(model, batch, fullgraph=True)
    assert [leaf.requires_grad for leaf in pytree.tree_leaves(split(*batch[0]))] == expected


def test_stage_of_a_gradient_that_depends_on_nothing() -> None:
    model = layered(FLAT["nonzero count"])
    stage = autosplit.Stage(model, (torch.randn(3, 4, requires_grad=True),))
    assert [differentiable for *_, differentiable in stage.output_specs] == [True]
    for microbatch in (0, 1):
        stage.forward(microbatch, [torch.randn(3, 4)])
    assert stage.backward_input(0, [torch.ones(())]) == [None]
    stage.backward_weight(0)
    assert stage.backward(1, [torch.ones(())]) == [None]
    stage.publish()
    assert model.linear.weight.grad is None


def all_different(output: Any) -> Tensor:
    """A loss whose gradient has no two elements equal."""
    leaves = pytree.tree_leaves(output)
    return sum((leaf * torch.arange(leaf.numel()).view(leaf.shape)).sum() for leaf in leaves)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_output_that_overlaps_itself(name: str) -> None:
    model = layered(OVERLAPPING[name])
    assert_equals_autograd(model, leaves(3, 4), all_different, fullgraph=True)


def test_output_that_overlaps_itself_compiled() -> None:
    """torch.compile's own gradients of these are wrong."""
    model, near = layered(OVERLAPPING["unfold"]), within(2e-6)
    assert_equals_autograd(model, leaves(3, 4), all_different, compare=near, backend="inductor")


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


@pytest.mark.parametrize(
    ("name", "shape"),
    [("view", (3, 4)), ("view", (2, 3, 4)), ("input", (3, 4)), ("chunks", (2, 3, 4))],
)
def test_outputs_may_be_written_into(name: str, shape: tuple[int, ...]) -> None:
    """A custom autograd function that returns views would forbid it; autograd does not."""
    model, x, result = layered(CASES[name]), torch.randn(shape, requires_grad=True), []
    split = autosplit.split(model)
    for module in (split, model):
        for _ in range(2):
            output = module(x)
            first = output if isinstance(output, Tensor) else output[0]
            # Autograd forbids to write into what chunk gives.
            first = first.mul_(2.0) if module is split else first * 2.0
            first.sum().backward()
        split.backward_weight()
        result.append((x.grad, model.linear.weight.grad))
        x.grad = model.linear.weight.grad = None
    assert all(map(torch.equal, *result))


def test_output_that_was_saved_and_is_written_is_refused() -> None:
    split = autosplit.split(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sigmoid()))
    output = split(torch.randn(3, 4))
    output.mul_(2.0)
    with pytest.raises(autosplit.SplitError, match="written in place between the forward"):
        output.sum().backward()


def test_input_without_a_part_in_the_loss_has_no_gradient() -> None:
    """None as in autograd, not zeros."""
    microbatches = [tuple(torch.randn(3, 4).requires_grad_() for _ in range(2)) for _ in range(2)]
    model = layered(lambda m, x, y: (m.linear(x), m.second(y.mul(2).mul_(3))))
    for used in (0, 1):
        assert_equals_autograd(model, microbatches, lambda output, at=used: output[at].sum())


def overwrites(module: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return module.linear(y)


def test_overwritten_input_that_nobody_reads_has_no_gradient() -> None:
    split = autosplit.split(layered(overwrites), fullgraph=True)
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
