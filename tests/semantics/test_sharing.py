"""Tied, repeated, frozen and unused parameters; inputs with and without gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit import Stage
from tests.semantics.against_autograd import assert_equals_autograd, mean_square


def floats(*shape: int) -> list[tuple[Tensor]]:
    return [(torch.randn(shape).requires_grad_(),) for _ in range(3)]


class Recurrent(nn.Module):
    """One module in a loop, another one that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x) + self.cell(2 * x))
        return x


def test_unused_parameters_and_inputs() -> None:
    batch = [(torch.randn(2, 4).requires_grad_(), torch.randn(3).requires_grad_())] * 2
    assert_equals_autograd(Recurrent(), batch)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.alias = self.cell

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.cell(x) + self.alias(2 * x))


def test_one_module_under_two_names() -> None:
    assert_equals_autograd(TwoNames(), floats(2, 4))


def test_inputs_that_need_no_gradient_and_keyword_inputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair: list[dict[str, Tensor]], *, extra: dict[str, Any]) -> Tensor:
            h = self.linear(pair[0]["a"]) + extra["b"]
            return h if extra["mask"] is None else h * extra["mask"]

    batch = [
        {
            "pair": [{"a": torch.randn(2, 4).requires_grad_()}],
            "extra": {"b": torch.randn(4), "mask": mask, "unused": 3},
        }
        for mask in (None, torch.ones(2, 4), None, torch.zeros(2, 4).requires_grad_())
    ]
    assert_equals_autograd(Nested(), batch)


def test_one_tensor_as_two_inputs() -> None:
    model = nn.Bilinear(4, 4, 3)
    x = torch.randn(5, 4, requires_grad=True)
    y = torch.randn(5, 4, requires_grad=True)
    assert_equals_autograd(model, [(x, y), (y, x)])
    split, plain = autosplit.split(model), copy.deepcopy(model)
    split.zero_grad()
    for module in (split, plain):
        mean_square(module(x, x)).backward()
        mean_square(module(x, y)).backward()
    split.backward_weight()
    grads = [x.grad, y.grad]
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    x.grad = y.grad = None
    for _ in range(2):
        mean_square(plain(x, x)).backward()
        mean_square(plain(x, y)).backward()
    assert torch.equal(grads[0], x.grad)
    assert torch.equal(grads[1], y.grad)


def test_called_twice_in_one_backward() -> None:
    """Siamese: one backward is one microbatch, and a parameter gets one sum."""
    model = nn.Linear(4, 4)
    split, plain = autosplit.split(model), copy.deepcopy(model)
    seen: list[int] = []
    model.weight.register_hook(lambda _: seen.append(1))
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    for module in (split, plain):
        for _ in range(2):
            (module(a) * module(b)).sum().backward()
    assert len(seen) == 2
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_tied_across_two_stages() -> None:
    """Embedding and head on two real stages: the sum of both is autograd's gradient."""
    embed, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    first = Stage(embed, [torch.zeros(3, 5, dtype=torch.long)], index=0)
    last = Stage(head, [torch.zeros(3, 5, 8, requires_grad=True)], index=1)
    with torch.no_grad():
        head.weight.copy_(embed.weight)
    weight = embed.weight.detach().clone().requires_grad_()
    for microbatch in range(2):
        tokens, grad = torch.randint(0, 11, (3, 5)), torch.randn(3, 5, 11)
        (hidden,) = first.forward(microbatch, [tokens.clone()])
        last.forward(microbatch, [hidden])
        (back,) = last.backward_input(microbatch, [grad.clone()])
        first.backward_input(microbatch, [back])
        F.linear(F.embedding(tokens, weight), weight).backward(grad)
    for stage in (first, last):
        for microbatch in range(2):
            stage.backward_weight(microbatch)
        stage.publish()
    torch.testing.assert_close(embed.weight.grad + head.weight.grad, weight.grad)
