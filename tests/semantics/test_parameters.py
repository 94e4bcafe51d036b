"""Parameters and buffers: shared, frozen, unused, parametrized, written, copied."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations as p
from torch import Tensor, nn
from torch.nn.utils import parametrize

import autosplit
from autosplit import CaptureError, SplitModule
from tests.dynamo.breaking import TwoLayers
from tests.semantics.against_autograd import (
    assert_equals_autograd,
    assert_same,
    assert_same_state,
    leaves,
    mean_square,
    one_by_one,
)
from tests.zoo import layered

# --- tied, repeated, frozen and unused parameters; inputs with and without gradients --------------


def recurrent(model: Any, x: Tensor, unused: Tensor) -> Tensor:
    """One module in a loop, another one that nobody calls."""
    for _ in range(3):
        x = torch.tanh(model.linear(x) + model.linear(2 * x))
    return x


def test_unused_parameters_and_inputs() -> None:
    batch = [(torch.randn(2, 4).requires_grad_(), torch.randn(3).requires_grad_())] * 2
    assert_equals_autograd(layered(recurrent), batch)


def test_one_module_under_two_names() -> None:
    model = layered(lambda m, x: torch.tanh(m.second(x) + m.linear(2 * x)))
    model.second = model.linear
    assert_equals_autograd(model, leaves(2, 4, count=3))


def test_inputs_that_need_no_gradient_and_keyword_inputs() -> None:
    def nested(model: Any, pair: list[dict[str, Tensor]], *, extra: dict[str, Any]) -> Tensor:
        h = model.linear(pair[0]["a"]) + extra["b"]
        return h if extra["mask"] is None else h * extra["mask"]

    batch = [
        {
            "pair": [{"a": torch.randn(2, 4).requires_grad_()}],
            "extra": {"b": torch.randn(4), "mask": mask, "unused": 3},
        }
        for mask in (None, torch.ones(2, 4), None, torch.zeros(2, 4).requires_grad_())
    ]
    assert_equals_autograd(layered(nested), batch)


# --- weights that are computed from other parameters ----------------------------------------------


CASES: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: p.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.Sequential(p.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
    "orthogonal": lambda: p.orthogonal(nn.Linear(4, 4)),
}


@pytest.mark.parametrize(
    ("name", "training"), [*((name, True) for name in CASES), ("spectral norm", False)]
)
def test_parametrized(name: str, training: bool) -> None:
    batch = leaves(3, 4)
    assert_equals_autograd(CASES[name]().train(training), batch)


def test_registered_and_removed_after_the_capture() -> None:
    batch = leaves(3, 4)
    model = nn.Sequential(nn.Linear(4, 4))
    assert_equals_autograd(model, batch)
    p.weight_norm(model[0])
    assert_equals_autograd(model, batch)
    parametrize.remove_parametrizations(model[0], "weight")
    assert_equals_autograd(model, batch)


# --- buffers that the forward reads and writes, as each microbatch saw them -----------------------


def counter_last(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x) + module.count
    module.count += 1
    return y


def running_cache(module: Any, x: Tensor) -> Tensor:
    module.cache[:, 2:] = module.linear(x)[:, :2].detach()
    return module.linear(x) + module.cache


def running_mean(module: Any, x: Tensor) -> Tensor:
    h = module.linear(x)
    with torch.no_grad():
        module.mean.lerp_(h.mean(0), 0.1)
    return h - module.mean


@pytest.mark.parametrize(
    ("make", "buffers"),
    [
        (counter_last, {"count": nn.Buffer(torch.zeros(()))}),
        (running_cache, {"cache": nn.Buffer(torch.zeros(2, 4))}),
        (running_mean, {"mean": nn.Buffer(torch.zeros(4))}),
    ],
)
def test_buffers_are_as_after_autograd(
    make: Callable[[Any, Tensor], Tensor], buffers: dict[str, Tensor]
) -> None:
    model = layered(make, **buffers)
    assert_equals_autograd(model, leaves(2, 4, count=3))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_running_statistics(training: bool) -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True))
    batch = leaves(3, 2, 5)
    assert_equals_autograd(model.train(training), batch)


def test_a_backward_reads_the_value_of_its_own_forward() -> None:
    """Autograd refuses to go back once the buffer was written; the graph kept a copy."""
    model = layered(lambda m, x: m.linear(x) * m.count.add_(1.0), count=nn.Buffer(torch.zeros(())))
    plain = copy.deepcopy(model)
    split = autosplit.split(model)
    inputs = leaves(2, 4, count=3)
    losses = [mean_square(split(*batch)) for batch in inputs]
    for loss in losses:
        loss.backward()
    split.backward_weight()
    one_by_one(plain, inputs, mean_square)
    assert_same_state(model, plain, assert_same)


def writes_both(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x) + module.b
    module.a.add_(1.0)
    module.b.mul_(2.0)
    return y


def test_one_buffer_under_two_names() -> None:
    buffer = nn.Buffer(torch.ones(4))
    assert_equals_autograd(layered(writes_both, a=buffer, b=buffer), leaves(2, 4, count=3))


def test_buffers_that_share_memory_are_refused() -> None:
    model = layered(writes_both, a=nn.Buffer(torch.zeros(2, 4)))
    model.register_buffer("b", model.a[0])
    with pytest.raises(CaptureError, match=r"ViewBaseAOTInput.*'b'"):
        autosplit.split(model).capture(torch.randn(2, 4))


# --- copies and pickles of a split module: no graphs, no pending work, the same model -------------


def saved_and_loaded(given: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


COPIES: dict[str, Callable[[SplitModule], SplitModule]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda split: pickle.loads(pickle.dumps(split)),
    "torch.save": saved_and_loaded,
}


WHOLE, PARTS = partial(nn.BatchNorm1d, 4), TwoLayers


@pytest.mark.parametrize(
    ("name", "last"),
    [("deepcopy", WHOLE), ("torch.save", WHOLE), ("deepcopy", PARTS), ("pickle", PARTS)],
)
def test_copy_is_a_split_module_of_its_own(name: str, last: Callable[[], nn.Module]) -> None:
    """Parameters are copied and pickled without ``.grad``, as of any module."""
    split = autosplit.split(
        nn.Sequential(nn.Linear(4, 4), last()), max_graphs=3, max_pending=math.inf
    )
    x = torch.randn(3, 4)

    def backward(module: SplitModule) -> None:
        for _ in range(2):
            module(x).square().sum().backward()
        assert module.pending == 2

    backward(split)
    other = COPIES[name](split)
    assert other.functions == ()
    assert other.pending == 0
    assert [parameter.grad for parameter in other.parameters()] == [None] * len(
        [*split.parameters()]
    )
    assert other.model is not split.model
    assert other.get_submodule("0").weight is other.model[0].weight
    assert len(saved_and_loaded([*split.parameters()], weights_only=True)) >= 4
    assert split.pending == 2
    backward(other)
    for mine, theirs in zip(split.parameters(), other.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine.grad, theirs.grad)


def test_state_dict_is_the_models() -> None:
    """Version and extra state of a root module included."""
    model = nn.BatchNorm1d(3)
    split = autosplit.split(model)
    assert split.state_dict()._metadata == model.state_dict()._metadata
    nested = nn.Sequential(split)
    assert list(nested.state_dict()) == [f"0.{key}" for key in model.state_dict()]
    nested.load_state_dict(nn.Sequential(nn.BatchNorm1d(3)).state_dict())
