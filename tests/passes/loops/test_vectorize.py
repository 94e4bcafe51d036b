"""lift: what the steps of an unrolled loop need not do one by one is done once, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosplit.capture.joint_graph import capture
from autosplit.passes import Kind, SplitGraphs
from autosplit.passes.graph import inputs
from autosplit.passes.loops.vectorize import vectorize_loops
from autosplit.passes.manager import run
from autosplit.passes.rewrites.padded_sums import concatenate_padded_sums
from autosplit.passes.verify import verify
from autosplit.runtime.split_options import backend_named
from tests.passes.graphs import computed, ops, program_of
from tests.semantics.against_autograd import assert_equals_autograd

X = torch.randn(3, 6, 4)


class Call(nn.Module):
    """A function with a weight, so that there is a W."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.weight)


def state_space(x: Tensor) -> Tensor:
    """As in Mamba: only the state waits for the step before."""
    decay, drive, read = x.sigmoid(), x * 2, x.sin()
    state, outputs = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        state = decay[:, step] * state + drive[:, step]
        outputs.append(torch.bmm(state[:, None], read[:, step, :, None])[:, 0])
    return torch.stack(outputs, 1)


def read_out(x: Tensor) -> Tensor:
    """The last pieces are as long as steps, and something else lies beside them."""
    state, outputs = torch.zeros_like(x[:, 0]), [x[:, 1:3]]
    for step in range(x.shape[1]):
        state = (state + x[:, step]).tanh()
        outputs.append((state * 3).unsqueeze(1))
    return torch.cat(outputs, 1)


def gates(x: Tensor) -> Tensor:
    """What is made of slices alone."""
    state = torch.ones_like(x[:, 0])
    for step in range(x.shape[1]):
        state = state.tanh() * (x[:, step] * x[:, step].abs())
    return state


LIFTED = [state_space, read_out]


def few(x: Tensor) -> Tensor:
    return torch.stack([x[:, step].sin() * 2 for step in range(3)])


def inexact(x: Tensor) -> Tensor:
    """Vectors and single numbers have different exponentials."""
    return torch.stack([x[:, step].sin().exp() for step in range(6)])


def too_large(x: Tensor) -> Tensor:
    """All outer products at once would be four times as large as anything that is there."""
    total = torch.zeros(4)
    for step in range(x.shape[1]):
        total = total.sin() + (x[:, step, :, None] * x[:, step, None, :]).sum((0, 1))
    return total


LEFT_ALONE = [gates, few, inexact, too_large]


def joint_of(function: Callable[[Tensor], Tensor], backend: str) -> SplitGraphs:
    x = X.clone().requires_grad_()
    program = SplitGraphs(
        capture(Call(function), (x,), {}, backend_named(backend).decompositions).joint
    )
    concatenate_padded_sums(program)
    return program


def work(program: SplitGraphs) -> int:
    """How many operators do more than look at a tensor in another way."""
    found = ops(program.joint)
    return found.total() - sum(found[view] for view in ("select", "unsqueeze", "squeeze", "slice"))


@pytest.mark.parametrize(("function", "backend"), [(read_out, "eager"), (state_space, "inductor")])
def test_a_loop_does_less_and_computes_the_same(
    function: Callable[[Tensor], Tensor], backend: str
) -> None:
    program = joint_of(function, backend)
    before, expected = work(program), computed(program.joint)
    assert vectorize_loops(program)
    verify(program)
    assert work(program) < before
    assert all(map(torch.equal, computed(program.joint), expected))
    assert not vectorize_loops(program)


@pytest.mark.parametrize("function", LEFT_ALONE)
def test_what_is_no_loop_or_would_grow_stays(function: Callable[[Tensor], Tensor]) -> None:
    program = joint_of(function, "eager")
    before = ops(program.joint)
    assert not vectorize_loops(program)
    assert ops(program.joint) == before


def test_products_that_are_put_together_are_one_product() -> None:
    """The output, and the gradient of what is read; that of the state goes on step by step."""
    program = joint_of(state_space, "eager")
    expected = computed(program.joint)
    assert ops(program.joint)["bmm"] == 3 * 6
    assert vectorize_loops(program)
    assert ops(program.joint)["bmm"] == 2 + 6
    assert all(map(torch.equal, computed(program.joint), expected))


def saved_by(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What enters I, in fake."""
    joint = program_of(Call(function), X.clone().requires_grad_()).joint
    graphs = run(joint, memory="fast")
    assert graphs.backward_input is not None
    saved = inputs(graphs.backward_input.graph, Kind.SAVED)
    return [node.meta["val"] for node in saved.values()]


def test_states_are_saved_as_one_tensor() -> None:
    shapes = [tuple(each.shape) for each in saved_by(state_space)]
    assert shapes.count((3, 4)) == 1  # what the first step begins with
    assert len(shapes) < 8


def test_a_state_that_is_read_again_is_read_from_where_all_are() -> None:
    """The gradient of tanh wants every state by itself, that of the read-out all of them."""

    def function(x: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = (state + x[:, step]).tanh()
            outputs.append(state * state)
        return torch.stack(outputs, 1)

    assert len(saved_by(function)) < 6


def test_random_numbers_are_drawn_step_by_step() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.stack([torch.rand_like(x[:, step]) * x[:, step] for step in range(6)])

    program = joint_of(function, "eager")
    before = ops(program.joint)["rand_like"]
    vectorize_loops(program)
    verify(program)
    assert ops(program.joint)["rand_like"] == before


@pytest.mark.parametrize("function", LIFTED)
def test_gradients_are_those_of_autograd(function: Callable[[Tensor], Tensor]) -> None:
    assert_equals_autograd(Call(function), [(X.clone().requires_grad_(),)] * 2)
