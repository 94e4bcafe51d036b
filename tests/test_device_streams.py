"""What F leaves for I, and I for W, is waited for where they run on another stream of a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from autosplit.device import follow, stream_under
from autosplit.runtime.residuals import HandOver, Residuals

CUDA = torch.device("cuda", 0)


class Gpu:
    """Which stream is the current one."""

    def __init__(self) -> None:
        self.current = Mock(device=CUDA)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, Stream=Mock())
    monkeypatch.setattr("autosplit.device._accelerator", lambda: ("cuda", cuda))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: found.current)
    return found


def _tensor() -> Any:
    return Mock(spec=Tensor, device=CUDA)


def test_another_stream_waits_and_keeps_the_memory(gpu: Gpu) -> None:
    tensors = [None, _tensor(), _tensor()]
    first = stream_under(tensors)
    assert first is cast(Any, gpu.current)
    gpu.current = Mock(device=CUDA)
    follow(first, tensors)
    gpu.current.wait_stream.assert_called_once_with(first)
    for each in tensors[1:]:
        each.record_stream.assert_called_once_with(gpu.current)


def test_on_the_same_stream_nothing_is_done(gpu: Gpu) -> None:
    tensor = _tensor()
    follow(stream_under([tensor]), [tensor])
    gpu.current.wait_stream.assert_not_called()
    tensor.record_stream.assert_not_called()


def test_on_the_cpu_no_stream_is_looked_at(gpu: Gpu) -> None:
    here = torch.ones(1, device="cpu")
    assert stream_under([here]) is None
    follow(None, [here])
    gpu.current.wait_stream.assert_not_called()


@pytest.mark.parametrize("again", [False, True])
def test_residuals_are_taken_on_the_stream_of_who_takes_it(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    made, followed = Mock(), Mock()
    monkeypatch.setattr("autosplit.runtime.residuals.stream_under", lambda tensors: made)
    monkeypatch.setattr("autosplit.runtime.residuals.follow", followed)
    tensor = torch.ones(2)
    known = HandOver(("a",))
    known.on_streams = True
    residuals = Residuals(known, [tensor], ())
    taken = (residuals.again() if again else residuals).take()
    followed.assert_called_once()
    stream, tensors = followed.call_args.args
    assert stream is made
    assert tensors is taken
    assert taken == [tensor]
