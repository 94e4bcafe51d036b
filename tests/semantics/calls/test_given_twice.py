"""One tensor given as several inputs, and one module called by several threads."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, Stage
from tests.gradients import assert_same_gradients
from tests.semantics.against_autograd import assert_alike, assert_equals_autograd

# --- one tensor given as several inputs, as in ``model(input_ids=ids, labels=ids)`` ---------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Sum(Layer):
    def forward(self, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        output: Tensor = self.layer(a) * a + 2 * self.layer(b).tanh() * b
        return output if c is None else output + c * self.layer(c)


class Identity(Layer):
    """Computes something else if both inputs are one tensor."""

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return 3 * self.layer(a) if a is b else self.layer(a) + 2 * self.layer(b)


class Writing(Layer):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        result = self.layer(2 * a)
        a.mul_(2)
        return result + self.layer(3 * b)


class Nested(Layer):
    def forward(self, given: dict[str, Any], *rest: Tensor) -> Any:
        return self.layer(given["a"]) * self.layer(given["b"][0]) + self.layer(rest[0])


def one(trained: bool = False) -> Tensor:
    return torch.randn(3, 4).requires_grad_(trained)


@pytest.mark.parametrize(
    ("model", "order"), [(Sum, (0, 1, 2)), (Identity, (1, 0, 2)), (Identity, (2, 1, 0))]
)
def test_same_and_different_in_any_order(model: type[nn.Module], order: tuple[int, ...]) -> None:
    x, y = one(True), one(True)
    kinds = [(x, x), (x, y), (y, x.detach().requires_grad_())]
    split = assert_equals_autograd(model(), [kinds[at] for at in order], fullgraph=True)
    assert len(split.functions) == 2


def test_below_containers() -> None:
    x, y = one(), one()
    batch = [({"a": x, "b": [x]}, x), ({"a": x, "b": [y]}, x), ({"a": y, "b": [y]}, y)]
    assert len(assert_equals_autograd(Nested(), batch, fullgraph=True).functions) == 2


def test_views_of_one_another_share_a_graph_with_strangers() -> None:
    x = one()
    split = assert_alike(
        Sum(),
        *(lambda call, _, y=y: call(x, y).sum().backward() for y in (x[:], one(), x[:])),
        fullgraph=True,
    )
    assert len(split.functions) == 1


@pytest.mark.parametrize("same_first", [True, False])
def test_written_into(same_first: bool) -> None:
    def drive(call: Any, _: nn.Module) -> list[Tensor]:
        inputs = []
        for same in (same_first, not same_first, same_first):
            inputs.append(one())
            call(inputs[-1], inputs[-1] if same else one()).sum().backward()
        return inputs

    assert_alike(Writing(), drive, fullgraph=True, pending=3)


def test_written_into_one_of_two_views() -> None:
    x = one()
    with pytest.raises(CaptureError, match=r"shares memory with another input\. Pass a clone"):
        autosplit.split(Writing(), fullgraph=True)(x, x[:])

    def drive(call: Any, _: nn.Module) -> Tensor:
        y = x.clone()
        call(y, y[:]).sum().backward()
        return y

    assert_alike(Writing(), drive)


def test_a_stage_takes_its_inputs_for_different_ones() -> None:
    x, y = one(), one()
    model = Identity()
    (result,) = Stage(model, (x, x)).forward(0, [x, y])
    assert torch.equal(result, model(x, y))


# --- several threads with one split module --------------------------------------------------------


def test_threads_share_one_queue() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = copy.deepcopy(model)
    split = autosplit.split(model, max_pending=math.inf)
    batches = [torch.randn(4 + index % 2, 8, dtype=torch.float64) for index in range(24)]

    def work(batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        split(x).square().sum().backward()
        return x.grad

    with ThreadPoolExecutor(4) as pool:
        grads = list(pool.map(work, batches))
        # A thread that traces computes what others have pending, which the trace would find.
        assert 12 < split.pending <= len(batches)
        assert len(split.functions) == 2
        list(pool.map(lambda _: split.backward_weight(), batches))
    assert split.pending == 0
    for batch, grad in zip(batches, grads, strict=True):
        x = batch.clone().requires_grad_()
        plain(x).square().sum().backward()
        assert torch.equal(grad, x.grad)
    assert_same_gradients(model, plain, exact=False)
    torch.optim.SGD(model.parameters()).step()  # no guard is left behind


def test_two_modules_captured_at_once() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]
    splits = [autosplit.split(model) for model in models]
    x = torch.randn(2, 4)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda split: split(x), splits))
    for model, output in zip(models, outputs, strict=True):
        assert torch.equal(model(x), output)
