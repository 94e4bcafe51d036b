"""Buffers get their new values after F, which only returns them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.runtime import functions as functions_module
from autosplit.runtime.functions import SplitFunctions


def norms(count: int) -> tuple[nn.Module, SplitFunctions]:
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(count)))
    return model, autosplit.split(model).capture(torch.randn(5, 4))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_one_call_writes_all_buffers_of_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model, functions = norms(3)
    written: list[set[torch.dtype]] = []

    def spy(buffers: list[Tensor], values: list[Tensor]) -> None:
        written.append({buffer.dtype for buffer in buffers})
        torch._foreach_copy_(buffers, values)

    monkeypatch.setattr(functions_module, "copy_together", spy)
    expected = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    x = torch.randn(5, 4)
    expected(x)
    with torch.no_grad():
        functions.run(state_of(model), [x])
    assert written == [{torch.float32}, {torch.int64}]
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


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
