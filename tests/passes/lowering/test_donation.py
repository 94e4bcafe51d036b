"""What a backward may write over: values that the forward saved and that nobody else can reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosplit.passes import Kind, Role, SplitGraphs, run
from autosplit.passes.graph import inputs, outputs
from autosplit.passes.lowering.buffers import donatable, donate, is_donated
from tests.passes.graphs import joint_of


class Between(nn.Module):
    """``tanh`` is saved for its own gradient; ``finish`` says who else gets it."""

    def __init__(self, finish: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.finish = finish

    def forward(self, x: Tensor) -> object:
        return self.finish(torch.tanh(x * self.scale))


def graphs_of(module: nn.Module) -> SplitGraphs:
    x = torch.randn(3, 4, requires_grad=True)
    return run(joint_of(module, x), memory="fast")


def saved_from(graphs: SplitGraphs, operator: str) -> Role:
    pairs = outputs(graphs.forward.graph, Kind.SAVED)
    (role,) = [role for role, node in pairs if operator in str(node.target)]
    return role


def test_a_value_of_the_forward_alone() -> None:
    graphs = graphs_of(Between(lambda y: y.sin()))
    assert saved_from(graphs, "tanh") in donatable(graphs.forward.graph)


@pytest.mark.parametrize(
    "finish",
    [lambda y: (y, y.sin()), lambda y: (y.view(12), y.sin()), lambda y: (y[0], y.sin())],
    ids=["output", "view", "part"],
)
def test_what_is_an_output_too_is_not_given_away(finish: Callable[[Tensor], object]) -> None:
    graphs = graphs_of(Between(finish))
    assert saved_from(graphs, "tanh") not in donatable(graphs.forward.graph)


def test_inputs_and_state_are_not_given_away() -> None:
    graphs = graphs_of(Between(lambda y: y.sin()))
    made = {role for role, node in outputs(graphs.forward.graph) if node.op == "call_function"}
    assert donatable(graphs.forward.graph) <= made


def test_what_waits_for_the_weights_is_not_written_over() -> None:
    """The second layer's input is read by W, its square by I alone."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh()).sin()

    graphs = graphs_of(Layers())
    roles = donatable(graphs.forward.graph)
    assert saved_from(graphs, "tanh") in roles
    assert graphs.backward is not None
    assert graphs.backward_input is not None
    donate(roles, graphs.backward, graphs.backward_input)
    donated = [
        {role for role, node in inputs(module.graph, Kind.SAVED).items() if is_donated(node)}
        for module in (graphs.backward, graphs.backward_input)
    ]
    assert donated[0] == roles
    assert donated[1] == roles - {saved_from(graphs, "tanh")} != set()
