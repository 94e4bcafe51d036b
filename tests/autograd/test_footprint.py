"""What the autograd face leaves behind: no tensor after its last use, no object, no waiting."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

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


@collecting_new_objects_only()
def test_tensors_die_at_their_last_use() -> None:
    """What only I reads is gone after I, inputs and what W reads after W; without the collector."""
    split = autosplit.split(model())
    step(split)
    gc.collect()
    gc.disable()
    try:
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
    finally:
        gc.enable()


@collecting_new_objects_only()
def test_nothing_grows_over_200_steps() -> None:
    """Neither objects nor cycles that only the collector would find."""
    split = autosplit.split(model())
    for _ in range(5):
        step(split)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(200):
            step(split)
        assert len(gc.get_objects()) - before < 20
    finally:
        gc.enable()
