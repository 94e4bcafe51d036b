"""Storages of a microbatch leave their stage and return."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autosplit import SplitError, Stage
from autosplit.runtime import residuals
from autosplit.torch_internals.state import distinct_storage_bytes
from tests.microbatches import Twins
from tests.zoo import Made

NAMES = ["convolutions", "tied", "in_place"]


def _away_and_back(stage: Stage, microbatch: int) -> int:
    """How many bytes were away; they come back as clones, and the old ones are freed."""
    received = stage.detach_held(microbatch)
    gone = [StorageWeakRef(tensor.untyped_storage()).expired for tensor in received]
    clones = [tensor.clone() for tensor in received]
    count = distinct_storage_bytes(received)
    assert count == sum(tensor.numel() for tensor in received)
    del received
    assert all(ended() for ended in gone)
    stage.attach_held(microbatch, clones)
    return count


def _equal_after_round_trips(name: str, run: str = "split") -> None:
    options = {"late": {"defer_whole_backward": True}, "lean": {"memory": "lean"}}
    twins = Twins(name, 2, **options.get(run, {}))
    stage, moved = twins.stage, 0
    twins.forward()
    for m in (0, 1):
        moved += _away_and_back(stage, m)
    twins.backward(whole=run == "B")
    for m in (0, 1) if run != "B" else ():
        moved += _away_and_back(stage, m)
    if run != "B":
        for m in (0, 1):
            stage.backward_weight(m)
    assert moved
    twins.assert_alike()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bit_for_bit_after_a_round_trip(name: str) -> None:
    _equal_after_round_trips(name)


@pytest.mark.parametrize("run", ["B", "late", "lean"])
def test_and_however_the_backward_runs(run: str) -> None:
    _equal_after_round_trips("transformer", run)


def _qkv() -> tuple[Stage, int]:
    """A stage of which F saves two views of one storage, and how many bytes that has."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return q * k + v

    return Stage(Mixed(), [torch.zeros(4, 8, requires_grad=True)]), 4 * 4 * 24


def test_views_of_one_storage_travel_once_and_are_views_of_one_again() -> None:
    stage, size = _qkv()
    stage.forward(0, [torch.randn(4, 8)])
    earlier = stage.saved_bytes
    sizes = sorted(tensor.numel() for tensor in stage.held(0))
    assert sizes == [4 * 4 * 8, size]
    assert _away_and_back(stage, 0) == earlier == sum(sizes) == stage.saved_bytes


def test_storages_shared_by_microbatches_stay() -> None:
    """A batch that was cut, however many are in flight, and a tensor that two were given."""
    batch, mask = torch.randn(4, 6), torch.randn(2, 6)

    masked = Made(lambda m, x, mask: m.linear(x * mask), linear=nn.Linear(6, 6))
    stage = Stage(masked, [torch.zeros(2, 6, requires_grad=True), torch.zeros(2, 6)])
    for m, part in enumerate(batch.chunk(2)):
        stage.forward(m, [part, mask])
    product = 4 * 2 * 6
    for m in (0, 1):
        assert [tensor.numel() for tensor in stage.held(m)] == [product]
    stage.backward(1, [torch.randn(2, 6)])
    # Nobody else has the mask any more as far as the stage knows; the batch still is a whole.
    assert [tensor.numel() for tensor in stage.held(0)] == [product, product]
    assert [tensor.numel() for tensor in stage.held(0, kept=[mask])] == [product]


def test_nothing_runs_while_tensors_are_away() -> None:
    stage, _ = _qkv()
    stage.forward(0, [torch.randn(4, 8)])
    received = stage.detach_held(0)
    away = r"stage 0: tensors of microbatch 0 are detached; call attach_held\(\)"
    for call in (stage.backward_input, stage.backward):
        with pytest.raises(SplitError, match=away):
            call(0, [torch.randn(4, 8)])
    with pytest.raises(SplitError, match="microbatch 0 are detached already"):
        stage.detach_held(0)
    stage.attach_held(0, received)
    stage.backward_input(0, [torch.randn(4, 8)])
    received = stage.detach_held(0)
    with pytest.raises(SplitError, match=away):
        stage.backward_weight(0)
    with pytest.raises(SplitError, match="weight gradients of microbatch 0 are pending"):
        stage.publish()
    stage.attach_held(0, received)
    stage.backward_weight(0)
    with pytest.raises(SplitError, match="stage 0: microbatch 0 holds nothing that could be moved"):
        stage.held(0)


def test_only_the_same_bytes_come_back() -> None:
    stage, _ = _qkv()
    stage.forward(0, [torch.randn(4, 8)])
    received = stage.detach_held(0)
    wide = torch.zeros(2 * len(received[0]), dtype=torch.uint8)
    wrong = {
        "got none": [],
        f"got {len(received[1])} bytes on cpu, ": received[::-1],
        "of torch.float32": [received[0].float(), received[1]],
        f"got {len(received[0])} of {len(wide)} bytes": [wide[: len(received[0])], received[1]],
    }
    for message, inputs in wrong.items():
        with pytest.raises(SplitError, match=re.escape(message)) as caught:
            stage.attach_held(0, inputs)
        assert "stage 0: microbatch 0: expected the storages that were detached" in str(caught)
    stage.attach_held(0, received)


def test_a_write_is_noticed_before_tensors_leave_and_while_they_are_away() -> None:
    x = torch.randn(4, 8)
    stage, size = _qkv()
    stage.forward(0, [x])
    received = stage.detach_held(0, kept=[x])
    assert [tensor.numel() for tensor in received] == [size]
    x.add_(1.0)
    written = "written in place between the forward and its backward"
    with pytest.raises(SplitError, match=written):
        stage.attach_held(0, received)
    stage.reset()
    stage.forward(0, [x])
    x.add_(1.0)
    with pytest.raises(SplitError, match=written):
        stage.detach_held(0)


class _Counted:
    """A function with how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._function(*args)


def test_a_microbatchs_storages_are_looked_for_once_while_others_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look = _Counted(residuals.detachable)
    monkeypatch.setattr(residuals, "detachable", look)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU())
    stage = Stage(model, [torch.zeros(2, 6, requires_grad=True)])
    microbatches = range(6)
    for _ in range(3):
        for microbatch in microbatches:
            stage.forward(microbatch, [torch.randn(2, 6)])
        inputs = [stage.detach_held(microbatch) for microbatch in microbatches]
        assert all(inputs)
        for microbatch, item in zip(microbatches, inputs, strict=True):
            stage.attach_held(microbatch, item)
            stage.backward(microbatch, [torch.ones(2, 6)])
    assert look.calls <= 3 * 2 * len(microbatches)  # once as it leaves, and once when it is away
