"""``.grad`` read, stepped on, cleared and added to by one thread while another computes W."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from tests.autograd.faces import Net
from tests.gradients import assert_same_gradients

PATIENCE = 60.0
SOON = 0.05  # in which whatever does not wait would have come through


def backward(module: Any, *inputs: Tensor) -> None:
    for x in inputs:
        module(x).square().sum().backward()


class Thread(threading.Thread):
    """Runs a function; ``ended`` gives what it returned, or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def waits(self) -> bool:
        self.join(SOON)
        return self.is_alive()

    def ended(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result


class Gate:
    """Holds the thread that computes before W, or after it and before it is in ``.grad``."""

    def __init__(self, delivery: Any, after_weight: bool) -> None:
        self._delivery, self._after_weight = delivery, after_weight
        self.reached, self._opened = threading.Event(), threading.Event()
        self.has_observers = False

    def deliver(self, *args: Any) -> None:
        if self._after_weight:
            self._delivery.deliver(*args)
        self.reached.set()
        assert self._opened.wait(PATIENCE)
        if not self._after_weight:
            self._delivery.deliver(*args)

    def notify_observers(self, microbatches: Any) -> None:
        self._delivery.notify_observers(microbatches)

    def open(self) -> None:
        self._opened.set()


@contextmanager
def computing(split: Any, after_weight: bool) -> Iterator[tuple[Gate, Thread]]:
    """A thread has read a gradient's values, and computes all that is pending until the gate is
    opened. Its reading is right then.
    """
    queue, parameter = split._queue, next(split.parameters())
    gate = Gate(queue.delivery, after_weight)
    queue.delivery = gate
    try:
        logger = Thread(lambda: parameter.grad.norm())
        assert gate.reached.wait(PATIENCE)
        queue.delivery = gate._delivery
        yield gate, logger
    finally:
        gate.open()
        logger.ended()


def sgd(module: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, **how)


def clip(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    sgd(module).step()


def by_hand(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad


USES: dict[str, Callable[[Any], Any]] = {
    "step": lambda module: sgd(module).step(),
    "fused step": lambda module: sgd(module, fused=True).step(),
    "clip": clip,
    "by hand": by_hand,
}


@pytest.fixture(params=[False, True], ids=["before W", "after W"])
def after_weight(request: pytest.FixtureRequest) -> bool:
    result: bool = request.param
    return result


@pytest.fixture(scope="module")
def captured() -> Any:
    return autosplit.split(Net(), max_pending=4)


@pytest.fixture
def split(captured: Any) -> Any:
    captured.zero_grad()
    assert captured.pending == 0
    return captured


@pytest.mark.parametrize("name", USES)
def test_uses_of_gradients_wait_for_the_thread(name: str, after_weight: bool, split: Any) -> None:
    plain = copy.deepcopy(split.unsplit)
    x, y = torch.randn(2, 3, 4)
    backward(split, x, y)
    backward(plain, x, y)
    with computing(split, after_weight) as (gate, _):
        stepping = Thread(lambda: USES[name](split))
        assert stepping.waits()
        gate.open()
        stepping.ended()
    USES[name](plain)
    assert all(map(torch.equal, split.parameters(), plain.parameters()))


@pytest.mark.parametrize("cleared", [False, True], ids=["added to", "cleared"])
def test_backward_meanwhile(cleared: bool, after_weight: bool, split: Any) -> None:
    """Its microbatch waits. Where ``.grad`` was cleared before, the backward itself has to wait for
    the other thread, which refers to the gradient that it had.
    """
    plain = copy.deepcopy(split.unsplit)
    x, y = torch.randn(2, 3, 4)
    backward(split, x)
    backward(plain, x)
    with computing(split, after_weight) as (gate, _):
        for module in (split, plain) if cleared else ():
            module.zero_grad()
        training = Thread(lambda: backward(split, y))
        if cleared:
            assert training.waits()
            gate.open()
        training.ended()
        assert split.pending == 1
    backward(plain, y)
    assert_same_gradients(split.unsplit, plain)


def test_two_models_with_a_parameter_in_common() -> None:
    """Work that the other model defers while a thread computes is queued after it."""
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    two.weight = one.weight
    plain = copy.deepcopy(nn.ModuleList([one, two]))
    first, second = autosplit.split(one), autosplit.split(two)
    x = torch.randn(4, 3)
    backward(first, x)
    second.capture(x)
    with computing(first, after_weight=False):
        backward(second, x)
        assert (first.pending, second.pending) == (1, 0)
    for module in plain:
        backward(module, x)
    assert_same_gradients(nn.ModuleList([one, two]), plain, exact=False)


def test_step_while_another_thread_captures(split: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing has gradients that are pending out of its way; an optimizer finds them all the
    same.
    """
    from autosplit.runtime import specializations

    trace = specializations.trace
    reached, opened = threading.Event(), threading.Event()

    def held(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        assert opened.wait(PATIENCE)
        return trace(*args, **kwargs)

    monkeypatch.setattr(specializations, "trace", held)
    plain = copy.deepcopy(split.unsplit)
    x = torch.randn(3, 4)
    backward(split, x)
    backward(plain, x)
    other = torch.randn(5, 1, 4)
    capturing = Thread(lambda: split.capture(other))
    try:
        assert reached.wait(PATIENCE)
        Thread(lambda: sgd(split).step()).ended()
    finally:
        opened.set()
        capturing.ended()
    sgd(plain).step()
    assert all(map(torch.equal, split.parameters(), plain.parameters()))
