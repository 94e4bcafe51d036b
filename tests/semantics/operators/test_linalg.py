"""Linear algebra that checks whether it succeeded: split as anything else, and it still checks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.torch_internals.version import TORCH
from tests.semantics.against_autograd import assert_equals_autograd

Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, torch.ones(4, 4)),
    "cholesky": torch.linalg.cholesky,
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "eig": lambda a: torch.view_as_real(torch.linalg.eig(a)[0]).square().sum(-1),
}
RAISING = ("inv", "solve", "cholesky")


class Algebra(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        h = self.before(x)
        return self.after(self.function(h @ h.mT + torch.eye(4)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_in_one_graph(name: str) -> None:
    batch = [(torch.randn(4, 4, requires_grad=True),) for _ in range(2)]
    split = assert_equals_autograd(Algebra(FUNCTIONS[name]), batch, fullgraph=True)
    (functions,) = split.functions
    assert functions.late_parameters


class Bare(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "eager") for name in RAISING), ("inv", "inductor")]
)
def test_raises_as_in_eager_mode(name: str, backend: str) -> None:
    if TORCH < (2, 12) and backend == "inductor":
        pytest.skip("Inductor of torch 2.11 leaves the check out, in torch.compile, too")
    model = Bare(FUNCTIONS[name])
    split = autosplit.split(copy.deepcopy(model), fullgraph=True, backend=backend)
    split(torch.eye(4)).sum().backward()
    with pytest.raises(torch.linalg.LinAlgError) as theirs:
        model(torch.zeros(4, 4))
    with pytest.raises(torch.linalg.LinAlgError) as ours:
        split(torch.zeros(4, 4))
    assert str(ours.value) == str(theirs.value)


def test_what_the_backward_checks_stays_in_the_backward() -> None:
    split = autosplit.split(Algebra(FUNCTIONS["eig"]), fullgraph=True)
    graphs = split.capture(torch.randn(4, 4)).graphs.graphs()
    check = torch.ops.aten._linalg_check_errors.default
    found = [n for n, g in graphs.items() if g.graph.find_nodes(op="call_function", target=check)]
    assert "forward" not in found
    assert {"backward", "backward_input"} <= {*found}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.algebra, self.layer = Algebra(torch.linalg.inv), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.algebra(x)
        torch._dynamo.graph_break()
        return self.layer(h)


def test_in_parts() -> None:
    split = assert_equals_autograd(Broken(), [(torch.randn(4, 4),) for _ in range(2)])
    assert "Deferred: the gradients of 6 of 6 parameters, 100.0 %" in split.report()
