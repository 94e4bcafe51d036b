"""Inputs whose sizes and numbers vary: graphs for any size, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit.torch_internals import TORCH
from tests.semantics.against_autograd import assert_equals_autograd, leaves
from tests.zoo import Attention, Residual, layered, llama

# --- inputs whose sizes vary: one graph holds for them, and what it assumes of sizes is checked ---


LENGTHS = (8, 5, 7, 33, 2)


def batches(*lengths: int) -> list[tuple[Tensor]]:
    return [(torch.randn(3, length, 16).requires_grad_(),) for length in lengths]


@pytest.mark.parametrize(("memory", "training"), [("balanced", False), ("lean", True)])
def test_the_second_length_is_the_last_to_be_captured(memory: str, training: bool) -> None:
    model = Attention().train(training)
    split = assert_equals_autograd(model, batches(*LENGTHS), memory=memory)
    assert len(split.functions) == 2
    assert "Captured for any size of args[0] along dimension 1;" in split.report()


def test_a_budget_is_met_for_each_length() -> None:
    budget = 9000
    split = assert_equals_autograd(Attention(), batches(8, 5, 9, 8), memory=budget)
    assert len(split.functions) == 3
    for length in (9, 5):
        split(torch.randn(3, length, 16).requires_grad_()).sum().backward()
        assert 0 < split.pending_bytes <= budget
        split.backward_weight()


def test_channels_and_images() -> None:
    shapes = [(2, 3, 8, 8), (2, 3, 9, 9), (2, 3, 12, 10), (2, 3, 7, 9)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    inputs = [(torch.randn(shape).requires_grad_(),) for shape in shapes]
    split = assert_equals_autograd(model, inputs)
    # torch 2.11 has one symbol for height and width if they are equal.
    assert len(split.functions) == (3 if TORCH < (2, 12) else 2)


def branches(model: Any, x: Tensor) -> Tensor:
    """It depends on whether the number of rows is divisible by four, and a power."""
    rows = len(x)
    if rows % 4 == 0:
        x = model.linear(x)
    if rows & (rows - 1) == 0:
        x = x * 2
    return model.second(x) * rows**-0.5  # type: ignore[no-any-return]


def test_sizes_that_a_model_branches_on_have_graphs_of_their_own() -> None:
    rows = [leaves(count, 4, count=1)[0] for count in (3, 5, 8, 12, 7, 6, 20, 16, 1)]
    split = assert_equals_autograd(layered(branches), rows)
    assert 3 <= len(split.functions) < len(rows)


def pair(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Broadcasts, where the second input has one row."""
    built: Tensor = model.linear(x)
    return built * y if len(x) == len(y) or len(y) == 1 else built.sum() + y


def test_sizes_that_were_equal_need_not_stay_so() -> None:
    sizes = [(3, 3), (5, 5), (7, 7), (6, 1), (4, 7), (9, 8), (2, 2)]
    split = assert_equals_autograd(
        layered(pair), [(torch.randn(a, 4).requires_grad_(), torch.randn(b, 4)) for a, b in sizes]
    )
    assert len(split.functions) < len(sizes)


def test_other_layouts_of_an_input() -> None:
    inputs = [torch.randn(3, length, 16) for length in (8, 5, 7)]
    turned = [torch.randn(16, length, 3).permute(2, 1, 0) for length in (6, 4)]
    assert_equals_autograd(Residual(16), [(x,) for x in inputs + turned])


@torch.library.custom_op("autosplit_tests::doubled_rows", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x])


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    rows, columns = x.shape
    if type(rows) is not int:
        raise TypeError("rows are to be a number")
    return x.new_empty(2 * rows, columns)


doubled.register_autograd(lambda ctx, grad: sum(grad.chunk(2)))


def test_models_that_need_fixed_sizes_are_captured_for_each() -> None:
    rows = [leaves(count, 4, count=1)[0] for count in (3, 5, 8, 5)]
    split = assert_equals_autograd(layered(lambda m, x: m.linear(doubled(x))), rows)
    assert len(split.functions) == 3
    assert "A graph is captured for each combination of input sizes:" in split.report()
    assert "rows are to be a number" in split.report()


def test_a_language_model_called_as_people_call_it() -> None:
    """Ids are their own labels; every product for a weight waits."""
    tokens = [torch.randint(0, 32, (2, length)) for length in (8, 5, 7)]
    split = assert_equals_autograd(
        llama(), [{"input_ids": token, "labels": token} for token in tokens], lambda out: out.loss
    )
    assert len(split.functions) == 2
    assert "Deferred: 100.0 %" in split.report()


class Positions(nn.Module):
    """Adds the first positions of a table, whose gradient is as long as the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(11, 8), nn.Parameter(torch.randn(64, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.table[: tokens.shape[1]]
        scores = self.head(x - x.mean(1, keepdim=True))
        return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def test_tables_of_positions() -> None:
    tokens = [torch.randint(0, 11, shape) for shape in ((2, 5), (2, 7), (2, 64), (3, 4), (5, 9))]
    split = assert_equals_autograd(Positions(), [(token,) for token in tokens])
    assert len(split.functions) == 3


# --- shapes and numbers that vary between calls, and the limit on graphs --------------------------


def scaled(model: Any, x: Tensor, factor: Any, mode: str = "same") -> Tensor:
    y: Tensor = model.linear(x) * factor
    return y.relu() if mode == "relu" else y


def test_python_numbers_and_strings() -> None:
    """Equal numbers of different types are different calls."""
    x = torch.randn(3, 4).requires_grad_()
    batch = [(x, 2), (x, 2.0), (x, True), (x, 1), (x, 1, "relu"), (x, 2)]
    split = assert_equals_autograd(layered(scaled), batch)
    assert len(split.functions) == 5


def test_the_graph_unused_for_longest_is_dropped() -> None:
    split = autosplit.split(nn.Linear(4, 4), max_graphs=2)
    first, second, third = (torch.randn(*size, 4) for size in ((1,), (2, 2), (2, 2, 2)))
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
    assert torch.equal(split.bias.grad, torch.full((4,), 9.0))


def test_an_output_outlives_its_graph() -> None:
    split = autosplit.split(nn.Linear(4, 4, bias=False), max_graphs=1)
    x, y = torch.randn(2, 4), torch.randn(3, 4)
    output = split(x)
    with pytest.warns(UserWarning, match="max_graphs"):
        split(y).sum().backward()
    output.sum().backward()
    split.backward_weight()
    torch.testing.assert_close(split.weight.grad, (x.sum(0) + y.sum(0)).expand(4, 4))
