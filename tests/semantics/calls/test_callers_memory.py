"""A loop may write into its batch after ``backward()``, seen by torch or not, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autosplit
from tests.dynamo.breaking import Branch
from tests.pending import works
from tests.semantics.against_autograd import assert_alike
from tests.zoo import Made


def twice() -> nn.Module:
    """W holds the input itself and a transposed view of it."""
    return Made(
        lambda m, x: m.a(x).tanh().sum() + m.b(x.t()).tanh().sum(),
        a=nn.Linear(8, 8),
        b=nn.Linear(6, 6),
    )


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
@pytest.mark.parametrize("build", [layers, lambda: Branch(8), twice])
def test_input_written_after_backward(build: Callable[[], nn.Module], needs_grad: bool) -> None:
    def drive(call: Any, _: nn.Module) -> None:
        for write in WRITES:
            memory = array()
            x = torch.from_numpy(memory).requires_grad_(needs_grad)
            call(x).square().sum().backward()
            write(memory, x)

    assert_alike(build(), drive)


@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 8), lambda: Branch(8)])
def test_incoming_gradient_in_memory_of_numpy(build: Callable[[], nn.Module]) -> None:
    def drive(call: Any, _: nn.Module) -> None:
        memory = np.ones((6, 8), np.float32)
        call(torch.from_numpy(array())).backward(torch.from_numpy(memory))
        memory.fill(0.0)

    assert_alike(build(), drive)


class Hidden(nn.Module):
    """W reads an output, or a view of it, and the incoming gradient, which ``z`` gets, too."""

    def __init__(self, *, view: bool, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.view, self.breaks = view, breaks

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        logits = self.head(hidden) + z
        if self.breaks:
            torch._dynamo.graph_break()
        return hidden.t() if self.view else hidden, logits * 1 if self.breaks else logits


AFTER: list[Callable[[Tensor], object]] = [
    lambda inputs: inputs.detach().numpy().fill(0.0),
    lambda inputs: np.from_dlpack(inputs.detach()).fill(0.0),  # type: ignore[call-overload]
    lambda inputs: inputs.data.zero_(),
    lambda inputs: inputs.share_memory_().detach().numpy().fill(0.0),
]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_outputs_and_gradients_written_after_backward(view: bool, breaks: bool) -> None:
    def drive(call: Any, _: nn.Module) -> None:
        for write in AFTER:
            z, gradient = torch.zeros(6, 4, requires_grad=True), torch.ones(6, 4)
            hidden, logits = call(torch.from_numpy(array()), z)
            torch.autograd.backward((hidden.sum(), logits), (None, gradient))
            for inputs in (hidden, logits, gradient, z.grad):
                write(inputs)

    assert_alike(Hidden(view=view, breaks=breaks), drive)


def test_an_output_that_nobody_holds_is_not_copied() -> None:
    split, places = autosplit.split(Hidden(view=False)), []
    for kept in (True, False):
        hidden, logits = split(torch.randn(6, 8), torch.zeros(6, 4))
        loss, place = (hidden.sum() + logits.sum()), hidden.data_ptr()
        if not kept:
            del hidden
        loss.backward()
        (work,) = works(split)
        places.append(place in {tensor.data_ptr() for tensor in work.tensors})
        split.backward_weight()
    assert places == [False, True]


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[:, ::2],
    lambda x: x[:, :1].expand(6, 4),
    lambda x: x.as_strided((6, 4), (8, 1), 2),
    lambda x: x[:, :4].t().contiguous().t(),
    lambda x: x[:0, :4],
]


def test_copies_lie_as_the_input_does() -> None:
    def drive(call: Any, _: nn.Module) -> None:
        for view in VIEWS:
            memory = array()
            call(view(torch.from_numpy(memory))).square().sum().backward()
            memory.fill(0.0)

    assert_alike(nn.Linear(4, 3), drive, fullgraph=True)


def test_an_input_that_an_earlier_module_computed_is_not_copied() -> None:
    split = autosplit.split(nn.Linear(8, 4))
    hidden = torch.randn(6, 8, requires_grad=True) * 2
    split(hidden).square().sum().backward()
    (work,) = works(split)
    assert hidden.data_ptr() in {tensor.data_ptr() for tensor in work.tensors}
