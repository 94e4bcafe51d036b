"""capture: roles for everything, and errors that name the user's line."""

from __future__ import annotations

import copy
import inspect
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from autosplit.capture.joint_graph import capture
from autosplit.passes.graph import Kind, inputs, outputs
from tests import devices
from tests.zoo import Made, Several, layered


def test_input_names_are_the_users_paths() -> None:
    x = torch.randn(2, requires_grad=True)
    model = Made(lambda _, a, pair, *, extra: a * pair[0] * pair[1] + extra["b"])
    traced = capture(model, (x, (x.detach(), 3)), {"extra": {"b": torch.ones(2)}})
    assert traced.inputs == ("args[0]", "args[1][0]", "args[1][1]", "extra['b']")
    results = [role.name for role in inputs(traced.joint.graph, Kind.INPUT)]
    assert results == ["args[0]", "args[1][0]", "extra['b']"]
    gradients = [role.name for role, _ in outputs(traced.joint.graph, Kind.INPUT_GRAD)]
    assert gradients == ["args[0]"]


def test_output_names_are_the_users_paths() -> None:
    traced = capture(Several(), (torch.randn(3, 4, requires_grad=True),), {})
    assert traced.outputs == tuple(
        f"output[{key!r}]" for key in ("y", "b", "top", "x", "best", "none")
    )
    tangents = {role.name for role in inputs(traced.joint.graph, Kind.TANGENT)}
    assert tangents == {f"output[{key!r}]" for key in ("y", "b", "top", "x")}


def test_capture_does_not_touch_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    earlier = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    capture(model, (torch.full((2, 4), float("nan")),), {})
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, earlier[name]), name


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(7, 7)


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2


def line_of(function: Callable[..., object], text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("model", "text", "because"),
    [
        (Branches(), "if x.sum() > 0", "Data-dependent branching"),
        (Broken(), "torch.zeros(7, 7)", "matmul fails: "),
        (Breaks(), "graph_break", "graph_break"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_names_the_users_line(model: nn.Module, text: str, because: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(2, 3, requires_grad=True),), {})
    message = str(caught.value)
    assert message.startswith(f"{type(model).__name__} cannot ")
    assert f"test_joint_graph.py:{line_of(type(model).forward, text)}\n" in message
    assert because in message


def writes_parameter(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.weight.mul_(0.5)
    return x * model.weight


def test_parameter_written_in_forward() -> None:
    with pytest.raises(CaptureError, match=re.escape("writes into parameter 'weight' in place")):
        capture(Made(writes_parameter, weight=nn.Parameter(torch.ones(3))), (torch.randn(3),), {})


def asserts(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    torch._assert_async((lengths <= 8).all(), "too long")
    return model.linear(x)


@pytest.mark.skipif(devices.chosen() == "cuda", reason="a failed assertion ends a GPU's process")
def test_assertion_stays_in_forward() -> None:
    split = autosplit.split(layered(asserts))
    split(torch.randn(2, 4), torch.tensor([8])).sum().backward()
    split.backward_weight()
    with pytest.raises(RuntimeError, match="too long"):
        split(torch.randn(2, 4), torch.tensor([9]))


class SetsSize(nn.Module):
    """Sets attributes and an entry on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.length = 0
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[0]
        self.seen["shape"] = tuple(x.shape)
        self.linear.mode = "wide" if x.shape[0] > 2 else "narrow"  # type: ignore[assignment]
        return self.linear(x) * (2 if self.linear.mode == "wide" else 3)


def test_attributes_set_on_every_call_are_as_in_eager() -> None:
    split = autosplit.split(SetsSize(), fullgraph=True, max_pending=math.inf)
    plain = copy.deepcopy(split.model)
    for rows in (2, 4, 4, 2):
        x = torch.randn(rows, 3)
        for model in (split, plain):
            model(x).sum().backward()
        assert (split.model.length, split.model.seen) == (plain.length, plain.seen)
        assert split.model.linear.mode == plain.linear.mode
    assert split.pending == 2  # the first call of each size is run as it is
    split.backward_weight()
    assert torch.equal(split.model.linear.weight.grad, plain.linear.weight.grad)


def counts(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return model.linear(x)


def test_side_effect_of_a_module_that_cannot_be_copied() -> None:
    model, x = layered(counts, calls=0, lock=threading.Lock()), torch.randn(2, 4)
    split = autosplit.split(model, fullgraph=True)
    split(x)
    with pytest.raises(CaptureError, match=r"changes Python state, self\.calls, which a graph"):
        split(x)
    parts = autosplit.split(layered(counts, calls=0, lock=threading.Lock()))
    parts(x).sum().backward()
    assert parts.model.calls == 1


def test_size_that_depends_on_the_data() -> None:
    with pytest.raises(CaptureError, match=r"depends on the data|data-dependent|dynamic"):
        capture(Made(lambda _, x: x[x[:, 0] > 0]), (torch.randn(4, 3, requires_grad=True),), {})


def test_forward_that_reads_its_parameters_through_a_closure() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    model.forward = lambda x: x @ weight
    with pytest.raises(CaptureError, match="a tensor that requires a gradient but is neither"):
        capture(model, (torch.randn(2, 3),), {})
