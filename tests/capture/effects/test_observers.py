"""Modes and trackers that count or log see what runs, and change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import autosplit


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def _inputs() -> list[Tensor]:
    return [torch.randn(3, 4, requires_grad=True) for _ in range(2)]


def _flops(counter: FlopCounterMode) -> dict[str, int]:
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("captured", [True, False], ids=["before", "inside"])
def test_flops_of_a_split_module_are_those_of_autograd(captured: bool) -> None:
    plain, inputs = _model(), _inputs()
    with FlopCounterMode(display=False) as expected:
        for output in [plain(x) for x in inputs]:
            output.sum().backward()
    split = autosplit.split(copy.deepcopy(plain), (inputs[0],) if captured else (), fullgraph=True)
    split.zero_grad()
    with FlopCounterMode(display=False) as result:
        for output in [split(x) for x in inputs]:
            output.sum().backward()
        split.backward_weight()
    assert _flops(result) == _flops(expected)
    assert len(split.functions) == 1
    for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_sizes_that_vary_are_left_open_under_a_mode() -> None:
    split = autosplit.split(_model(), fullgraph=True)
    with FlopCounterMode(display=False):
        for size in (2, 3, 5):
            split(torch.randn(size, 4)).sum().backward()
    assert len(split.functions) == 2


def test_another_hook_is_part_of_the_forward() -> None:
    split = autosplit.split(nn.Linear(4, 4), fullgraph=True)
    x = torch.randn(3, 4)
    plain = split(x)
    handle = hooks.register_module_forward_hook(_double)
    try:
        with ModuleTracker():
            doubled = split(x)
    finally:
        handle.remove()
    # Once on the linear layer, in the graph, and once on the split module itself.
    assert torch.equal(doubled, plain * 4)


def _double(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2
