"""Shapes and numbers that vary between calls, and the limit on graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError
from tests.semantics.against_autograd import assert_equals_autograd
from tests.zoo import Attention


def test_sequence_length_and_ragged_last_batch() -> None:
    shapes = [(2, 8, 16), (2, 5, 16), (2, 8, 16), (1, 8, 16)]
    batch = [(torch.randn(shape).requires_grad_(),) for shape in shapes]
    split = assert_equals_autograd(Attention(), batch)
    assert len(split.functions) == 3


def test_all_sizes_open_at_once() -> None:
    batches = [(torch.randn(2, length, 16).requires_grad_(),) for length in (8, 5, 7, 6, 9)]
    split = assert_equals_autograd(Attention().eval(), batches, dynamic=True)
    assert len(split.functions) == 1
    assert "any size of args[0] along dimension 0 and 1" in split.report()


def test_no_size_open() -> None:
    batches = [(torch.randn(2, length, 16),) for length in (8, 5, 7)]
    split = assert_equals_autograd(Attention(), batches, dynamic=False)
    assert len(split.functions) == 3


def test_sizes_in_parts() -> None:
    """A backend whose whole graphs need all sizes: two graphs of torch.compile's."""
    torch._dynamo.reset()
    split = autosplit.split(nn.Linear(3, 2), dynamic=True, backend="inductor", max_pending=math.inf)
    for rows in (8, 5, 7):
        split(torch.randn(rows, 3)).sum().backward()
    assert split.pending == 3
    assert "Linear is split graph by graph: Dynamo found 2, 2 of them split" in split.report()


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"memory": "lean"}], ids=str)
def test_options_that_need_whole_graphs(options: dict[str, Any]) -> None:
    with pytest.raises(SplitError, match=r"'inductor' splits graph by graph.*neither fullgraph"):
        autosplit.split(nn.Linear(2, 2), dynamic=True, backend="inductor", **options)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Any, mode: str = "same") -> Tensor:
        y = self.linear(x) * factor
        return y.relu() if mode == "relu" else y


def test_python_numbers_and_strings() -> None:
    """Equal numbers of different types are different calls."""
    x = torch.randn(3, 4).requires_grad_()
    batch = [(x, 2), (x, 2.0), (x, True), (x, 1), (x, 1, "relu"), (x, 2)]
    split = assert_equals_autograd(Scaled(), batch)
    assert len(split.functions) == 5


def test_the_graph_unused_for_longest_is_dropped() -> None:
    split = autosplit.split(nn.Linear(4, 4), max_graphs=2, dynamic=False)
    first, second, third = (torch.randn(size, 4) for size in (1, 2, 3))
    split(first)
    split(second)
    (kept, _) = split.functions
    split(first)
    with pytest.warns(UserWarning, match=r"Linear needed more than 2 graphs.*raise max_graphs"):
        split(third)
    assert len(split.functions) == 2
    assert split.functions[0] is kept
    for _ in range(2):
        split(second).sum().backward()  # captured again, without another warning
    split(first).sum().backward()
    split.backward_weight()
    assert torch.equal(split.bias.grad, torch.full((4,), 5.0))


def test_an_output_outlives_its_graph() -> None:
    split = autosplit.split(nn.Linear(4, 4, bias=False), max_graphs=1)
    x, y = torch.randn(2, 4), torch.randn(3, 4)
    output = split(x)
    with pytest.warns(UserWarning, match="max_graphs"):
        split(y).sum().backward()
    output.sum().backward()
    split.backward_weight()
    torch.testing.assert_close(split.weight.grad, (x.sum(0) + y.sum(0)).expand(4, 4))


def test_lazy_parameters_get_their_shape_at_the_first_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    split = autosplit.split(model)
    x = torch.randn(3, 5)
    for _ in range(2):
        split(x).square().sum().backward()
    split.backward_weight()
    assert model[0].weight.shape == (4, 5)
    assert model[1].num_batches_tracked == 2
    assert all(module.training for module in model)
    assert all(parameter.grad is not None for parameter in model.parameters())
