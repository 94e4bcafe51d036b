"""Graphs that leave sizes open are found again, for the sizes that they hold for and no others."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autosplit
from autosplit.capture import joint_graph
from autosplit.capture.cache import archive, split_graph_cache
from autosplit.capture.cache.alternatives import read_assumptions, with_assumptions
from autosplit.capture.cache.size_symbols import Assumptions, SizeSymbols
from autosplit.capture.cache.split_graph_cache import VARIABLE


@pytest.fixture(autouse=True, params=["untraced", "traced"])
def traced(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> bool:
    """Whether graphs are looked up by what Dynamo traced, or by the call."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    if request.param == "traced":
        monkeypatch.setattr(joint_graph, "_found", lambda *_: None)
    return bool(request.param == "traced")


class Layer(nn.Module):
    """A layer, and what is done with its result and the input."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x), x)


def train(
    then: Callable[[Tensor, Tensor], Tensor],
    rows: Iterable[int],
    memory: str | int = "balanced",
    dynamic: bool | None = True,
) -> tuple[int, int, int]:
    """Train a new split module on batches of so many rows, with gradients of plain autograd; how
    many graphs were found, not found and passed by.
    """
    before = counters["autosplit"].copy()
    model = Layer(then)
    plain = copy.deepcopy(model)
    split = autosplit.split(model, dynamic=dynamic, memory=memory)
    for count in rows:
        x = torch.randn(count, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        split(x).square().sum().backward()
        split.backward_weight()
        plain(y).square().sum().backward()
        for ours, autograds in zip((x, *model.parameters()), (y, *plain.parameters()), strict=True):
            torch.testing.assert_close(ours.grad, autograds.grad, rtol=0, atol=0)
    after = counters["autosplit"] - before
    return after["graph_hit"], after["graph_miss"], after["graph_bypass"]


def smooth(y: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(y) / x.shape[0]


def doubled_if_even(y: Tensor, x: Tensor) -> Tensor:
    return y * 2 if x.shape[0] % 2 == 0 else y


def root_if_long(y: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(y) * x.shape[0] ** 0.5 if x.shape[0] > 6 else y


def by_fives(y: Tensor, x: Tensor) -> Tensor:
    return nn.functional.pad(y, (0, 0, 0, -x.shape[0] % 5)).view(-1, 5, 4).cumsum(1)


@torch.library.custom_op("autosplit_tests::open_doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


def _gradient(ctx: object, grad: Tensor) -> Tensor:
    return grad + grad if grad.shape[0] % 3 == 0 else grad * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(_gradient)


def decided_behind_dynamo(y: Tensor, x: Tensor) -> Tensor:
    """Which gradient it has depends on a size, as AOTAutograd finds out."""
    result: Tensor = doubled(y)
    return result


def test_other_sizes_find_the_graph() -> None:
    assert train(smooth, (5, 7, 3)) == (0, 1, 0)
    assert train(smooth, (9, 4, 30)) == (1, 0, 0)


def test_sizes_that_broadcast_or_hold_nothing_have_their_own() -> None:
    assert train(smooth, (5, 1, 0, 3)) == (0, 3, 0)
    assert train(smooth, (7, 0, 1, 4)) == (3, 0, 0)


def test_the_second_size_leaves_it_open() -> None:
    assert train(smooth, (5, 7, 3), dynamic=None) == (0, 2, 0)
    assert train(smooth, (5, 9, 3), dynamic=None) == (2, 0, 0)


@pytest.mark.parametrize(
    "then", [doubled_if_even, root_if_long, decided_behind_dynamo], ids=lambda each: each.__name__
)
def test_sizes_on_the_other_side_of_a_guard_have_another_graph(
    then: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """6 is even, divisible by 3 and no more than 6; 7 is neither, and so is 11."""
    assert train(then, (6, 7, 11)) == (0, 2, 0)
    assert train(then, (11, 6, 7)) == (2, 0, 0)


def test_assumptions_behind_dynamo_are_checked() -> None:
    assert train(decided_behind_dynamo, (6, 9)) == (0, 1, 0)
    assert train(decided_behind_dynamo, (7,)) == (0, 1, 0)
    assert train(decided_behind_dynamo, (12, 3, 8, 5)) == (2, 0, 0)


def test_quotients_are_kept() -> None:
    assert train(by_fives, (7, 12)) == (0, 1, 0)
    assert train(by_fives, (8, 13, 27)) == (1, 0, 0)


def test_a_budget_is_for_the_sizes_of_its_example() -> None:
    assert train(smooth, (5, 3), memory=4096) == (0, 1, 0)
    assert train(smooth, (9, 3), memory=4096) == (0, 1, 0)
    assert train(smooth, (5, 3), memory=4096) == (1, 0, 0)


def test_assumptions_that_come_out_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(decided_behind_dynamo, (6,)) == (0, 1, 0)
    assume = SizeSymbols.assume
    with monkeypatch.context() as patched:
        patched.setattr(SizeSymbols, "assume", lambda *of: assume(*of) and False)
        assert train(decided_behind_dynamo, (6, 7)) == (0, 2, 0)
    assert train(decided_behind_dynamo, (9, 11)) == (2, 0, 0)


def test_reports_say_what_became_of_it() -> None:
    def said(x: Tensor) -> str:
        split = autosplit.split(Layer(smooth), dynamic=True)
        split(x).sum().backward()
        return split.report().partition("Graph cache: ")[2].partition(".\n")[0]

    assert said(torch.ones(5, 4)) == "made and kept"
    assert said(torch.ones(7, 4)) == "found"
    assert said(torch.ones(4, 5).t()) == "made and kept"
    assert said(torch.ones(4, 7).t()) == (
        "found; traced to look it up (sizes of a tensor are left open that is not contiguous)"
    )


def test_what_the_guards_would_not_check_is_refused(
    traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard that is added when the guards of a call that was found are built already."""
    assert train(smooth, (5,)) == (0, 1, 0)
    unpack = archive.unpack_graphs

    def assuming(data: bytes, mode: Any, *others: Any) -> Any:
        size, *_ = SizeSymbols(mode).order
        mode.shape_env.evaluate_expr(size < 100)
        return unpack(data, mode, *others)

    monkeypatch.setattr(split_graph_cache, "unpack_graphs", assuming)
    split = autosplit.split(Layer(smooth), dynamic=True)
    for count in (7, 200):
        split(torch.ones(count, 4, requires_grad=True)).sum().backward()
    assert len(split.functions) == 2
    assert ("more was assumed of sizes" in split.report()) is not traced


def test_a_key_has_eight_graphs_at_most() -> None:
    data = None
    for at in (*range(10), 5):
        data = with_assumptions(data, Assumptions((), str(at)))
    assert [each.state for each in read_assumptions(data)] == [*"59876432"]
    assert read_assumptions(b"?") == read_assumptions(None) == []
