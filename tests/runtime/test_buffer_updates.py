"""F writes buffers where they are, if nothing else reads them; ``forward`` writes copies."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.dump import program
from autosplit.runtime import functions as functions_module
from autosplit.runtime.functions import SplitFunctions


def norms(count: int) -> tuple[nn.Module, SplitFunctions]:
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(count)))
    return model, autosplit.split(model).capture(torch.randn(5, 4))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Averages(nn.Module):
    """Writes its buffers in two operators each, which no kernel does where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.count = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.count.add_(1).mul_(3)
        return x * 2


def test_one_call_writes_all_buffers_of_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(Averages() for _ in range(3)))
    functions, expected = autosplit.split(model).capture(torch.randn(5, 4)), copy.deepcopy(model)
    written: list[set[torch.dtype]] = []

    def spy(buffers: list[Tensor], values: list[Tensor]) -> None:
        written.append({buffer.dtype for buffer in buffers})
        torch._foreach_copy_(buffers, values)

    monkeypatch.setattr(functions_module, "copy_together", spy)
    x = torch.randn(5, 4)
    expected(x)
    with torch.no_grad():
        functions.run(state_of(model), [x])
    assert written == [{torch.float32}, {torch.int64}]
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_statistics_are_written_where_they_are() -> None:
    model, functions = norms(3)
    state, x = state_of(model), torch.randn(5, 4)
    assert copies_in(lambda: functions.run(state, [x])) == copies_in(lambda: model(x)) == 0
    assert "_legit_functional" in program("forward", functions.graphs.forward, "a dump")


def copies_in(call: Callable[[], object]) -> int:
    """How often a call copies a tensor to another."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name in {"aten::clone", "aten::copy_"} for event in profile.events())


class Looked(nn.Module):
    """Fails after its norm if an index is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.BatchNorm1d(4), nn.Embedding(3, 4)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.norm(x) + self.table(at)


def test_if_f_raises_buffers_are_those_of_eager_mode() -> None:
    model, x = Looked(), torch.randn(5, 4)
    expected = copy.deepcopy(model)
    split = autosplit.split(model)
    split(x, torch.ones(5, dtype=torch.int64))
    expected(x, torch.ones(5, dtype=torch.int64))
    before = {name: buffer._version for name, buffer in model.named_buffers()}
    for module in (split, expected):
        with pytest.raises(IndexError):
            module(2 * x, torch.full((5,), 7))
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
        assert model.get_buffer(name)._version > before[name], name


def test_python_calls_do_not_grow_with_buffers() -> None:
    assert calls_of_a_run(8) == calls_of_a_run(2)


def calls_of_a_run(count: int) -> int:
    """Python functions that a call of F runs, writes of buffers included."""
    model, functions = norms(count)
    state, x = state_of(model), torch.randn(5, 4)
    functions.run(state, [x])
    calls: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    leaves = [x]
    sys.setprofile(note)
    try:
        functions.run(state, leaves)
    finally:
        sys.setprofile(None)
    return len(calls)


def test_forward_writes_no_buffer() -> None:
    model, functions = norms(2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results = [functions.forward(state_of(model), [torch.ones(5, 4)]) for _ in range(2)]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    for first, second in zip(*(result.updates for result in results), strict=True):
        assert torch.equal(first, second)
