"""A loop may write into its batch after ``backward()``, seen by torch or not, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autosplit
from tests.gradients import assert_same_gradients
from tests.pending import works


class InParts(nn.Module):
    """A branch on data: two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() if h.sum() > 0 else h.tanh())


class Twice(nn.Module):
    """W holds the input itself and a transposed view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh().sum() + self.b(x.t()).tanh().sum()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def array() -> np.ndarray:
    return np.random.RandomState(0).randn(6, 8).astype(np.float32)


WRITES: list[Callable[[np.ndarray, Tensor], object]] = [
    lambda memory, x: memory.fill(0.0),
    lambda memory, x: x.data.zero_(),
    lambda memory, x: x.detach().zero_(),
]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("build", [layers, InParts, Twice])
def test_input_written_after_backward(build: Callable[[], nn.Module], needs_grad: bool) -> None:
    plain = build()
    split = autosplit.split(copy.deepcopy(plain))
    for write in WRITES:
        for model in (plain, split):
            model.zero_grad()
            for _ in range(2):
                memory = array()
                x = torch.from_numpy(memory).requires_grad_(needs_grad)
                model(x).square().sum().backward()
                write(memory, x)
        assert_same_gradients(split, plain)


@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 4), InParts])
def test_incoming_gradient_in_memory_of_numpy(build: Callable[[], nn.Module]) -> None:
    plain = build()
    split = autosplit.split(copy.deepcopy(plain))
    for model in (plain, split):
        memory = np.ones((6, 4), np.float32)
        model(torch.from_numpy(array())).backward(torch.from_numpy(memory))
        memory.fill(0.0)
    assert_same_gradients(split, plain)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(6, 4),
    "offset": lambda x: x.as_strided((6, 4), (8, 1), 2),
    "transposed": lambda x: x[:, :4].t().contiguous().t(),
    "empty": lambda x: x[:0, :4],
}


def test_copies_lie_as_the_input_does() -> None:
    plain = nn.Linear(4, 3)
    split = autosplit.split(copy.deepcopy(plain), fullgraph=True)
    for name, view in VIEWS.items():
        for model in (plain, split):
            model.zero_grad()
            memory = array()
            model(view(torch.from_numpy(memory))).square().sum().backward()
            memory.fill(0.0)
        assert torch.equal(split.weight.grad, plain.weight.grad), name


def test_what_an_earlier_module_computed_is_not_copied() -> None:
    split = autosplit.split(nn.Linear(8, 4))
    hidden = torch.randn(6, 8, requires_grad=True) * 2
    split(hidden).square().sum().backward()
    (work,) = works(split)
    assert hidden.data_ptr() in {tensor.data_ptr() for tensor in work.tensors}
