"""The autograd face keeps no tensor after its last use, no object and no waiting thread."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitModule
from autosplit.backends.backend import collecting_new_objects_only
from tests.pending import deferred_tensors


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.BatchNorm1d(8), nn.Linear(8, 4))


def step(split: SplitModule, microbatches: int = 2) -> None:
    for _ in range(microbatches):
        x = torch.randn(5, 6, requires_grad=True)
        split(x).square().sum().backward()
    split.backward_weight()
    split.zero_grad()


def watch(tensors: Iterable[Tensor]) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(tensor) for tensor in tensors]


def alive(refs: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    return [tensor for ref in refs if (tensor := ref()) is not None]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Only reference counts free objects inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_tensors_die_at_their_last_use() -> None:
    """I frees the tensors that only I reads, and W frees its own and the inputs."""
    split = autosplit.split(model())
    step(split)
    with collector_off():
        first, second = (torch.randn(5, 6, requires_grad=True) for _ in range(2))
        outputs = [split(first), split(second)]
        inputs = watch([first, second])
        saved = [watch(output.grad_fn.saved.tensors) for output in outputs]
        assert all(alive(refs) for refs in saved)
        del first, second
        outputs.pop(0).sum().backward()
        deferred = watch(deferred_tensors(split))
        waiting = {id(tensor) for tensor in alive(deferred)}
        left = alive(saved[0])
        assert {id(tensor) for tensor in left} <= waiting
        assert len(left) < len(saved[0])
        assert len(alive(saved[1])) == len(saved[1])
        del left
        split.backward_weight()
        grads = {id(parameter.grad) for parameter in split.parameters()}
        assert {id(tensor) for tensor in alive(deferred)} <= grads
        assert inputs[0]() is None
        outputs.clear()
        assert alive(saved[1]) == []
        assert inputs[1]() is None


def test_nothing_grows_over_200_steps() -> None:
    """Neither objects nor cycles that only the collector would find."""
    split = autosplit.split(model())
    for _ in range(5):
        step(split)
    with collector_off():
        earlier = len(gc.get_objects())
        for _ in range(200):
            step(split)
        assert len(gc.get_objects()) - earlier < 20


def blocks() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()) for _ in range(3)])


@pytest.mark.parametrize("build", [model, blocks])
def test_a_model_dies_with_its_last_reference(build: Callable[[], nn.Module]) -> None:
    """Graphs are cycles, and none of them holds the model: weights are not to wait for the
    collector, which may come late.
    """
    whole = build()
    split = autosplit.split(whole)
    with collector_off():
        for count in (3, 4, 5):  # the last one's sizes are left open
            split(torch.randn(count, 6, requires_grad=True)).sum().backward()
            split.backward_weight()
        died = weakref.ref(whole)
        del whole, split
        assert died() is None


class Cycle:
    """Holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Tests start with all objects frozen; a user's program does not."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
def test_old_garbage_is_collected_after_captures() -> None:
    """Captures keep the collector away from old objects; it gets its turn after them."""
    cycle = Cycle()
    gc.collect()  # it is old now
    left, kept = weakref.ref(cycle), []
    del cycle
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own
    try:
        for _ in range(30):
            with collecting_new_objects_only():
                kept.append([[index] for index in range(20_000)])
            kept.append([[index] for index in range(2_000)])
        assert gc.get_freeze_count() == 0
        kept.append([[index] for index in range(100_000)])
    finally:
        gc.set_threshold(*thresholds)
    assert left() is None


@pytest.mark.usefixtures("unfrozen")
def test_captures_scan_no_old_objects() -> None:
    """A scan of all objects, in a capture or soon after it, would take longer than its passes."""
    old = [[index] for index in range(100_000)]
    gc.collect()
    scanned: list[int] = []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            scanned.append(len(gc.get_objects()))

    gc.callbacks.append(look)
    try:
        with collecting_new_objects_only():
            old += [[index] for index in range(50_000)]
    finally:
        gc.callbacks.remove(look)
    assert len(scanned) == 1
    assert 50_000 <= scanned[0] < 60_000
    assert gc.get_count()[2] == 0


def test_captures_leave_frozen_what_the_user_froze() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with collecting_new_objects_only():
        cycle = Cycle()
        died = weakref.ref(cycle)
        del cycle
    assert died() is None
    assert gc.get_freeze_count() > count / 2  # frozen objects may die meanwhile


@pytest.mark.usefixtures("unfrozen")
def test_garbage_from_before_a_capture_is_collected() -> None:
    cycle = Cycle()
    died = weakref.ref(cycle)
    del cycle
    with collecting_new_objects_only():
        pass
    assert died() is None
