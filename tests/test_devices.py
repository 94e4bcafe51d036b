"""Tests on a device: which run, what generators and streams it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from autosplit.device import GeneratorStates, follow, generators_kept, stream_under
from autosplit.runtime.boundary_layout import BoundaryLayout
from autosplit.runtime.residuals import Residuals, StateRecord

# --- the option that has tests run on another device than the CPU ---------------------------------


# --- random generators are put back, and no more of them are touched than there are in use --------


def test_numbers_drawn_inside_are_drawn_again() -> None:
    with generators_kept():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)


def test_saved_generator_states_repeat_the_numbers() -> None:
    states = GeneratorStates.of([torch.ones(1)])
    first = torch.rand(3)
    with states.again():
        again = torch.rand(3)
    second = torch.rand(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("in_use", "expected"), [(False, []), (True, [0, 1])])
def test_gpus_that_nobody_uses_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, in_use: bool, expected: list[int]
) -> None:
    """Setting them up takes memory on each, and forbids to fork the process."""
    requested: list[int | None] = []
    kept: list[tuple[int | None, Any]] = []

    def get_rng_state(device: torch.device) -> int | None:
        requested.append(device.index)
        return device.index

    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: in_use,
        device_count=lambda: 2,
        get_rng_state=get_rng_state,
        set_rng_state=lambda state, device: kept.append((device.index, state)),
    )
    monkeypatch.setattr("autosplit.device._accelerator", lambda: ("cuda", cuda))
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    with generators_kept():
        assert requested == expected
        assert kept == []
    assert kept == [(index, index) for index in expected]


# --- what F leaves for I, and I for W, is waited for where they run on another stream of a GPU ----


CUDA = torch.device("cuda", 0)


class Gpu:
    """Which stream is the current one."""

    def __init__(self) -> None:
        self.current = Mock(device=CUDA)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    result = Gpu()
    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, Stream=Mock())
    monkeypatch.setattr("autosplit.device._accelerator", lambda: ("cuda", cuda))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: result.current)
    return result


def _tensor() -> Any:
    return Mock(spec=Tensor, device=CUDA)


def test_another_stream_waits_and_keeps_the_memory(gpu: Gpu) -> None:
    tensors = [None, _tensor(), _tensor()]
    first = stream_under(tensors)
    assert first is cast(Any, gpu.current)
    gpu.current = Mock(device=CUDA)
    follow(first, tensors)
    gpu.current.wait_stream.assert_called_once_with(first)
    for tensor in tensors[1:]:
        tensor.record_stream.assert_called_once_with(gpu.current)


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
    built, followed = Mock(), Mock()
    monkeypatch.setattr("autosplit.runtime.residuals.stream_under", lambda tensors: built)
    monkeypatch.setattr("autosplit.runtime.residuals.follow", followed)
    tensor = torch.ones(2)
    layout = BoundaryLayout(("a",))
    layout.on_streams = True
    residuals = Residuals(layout, [tensor], StateRecord(layout, ()))
    received = (residuals.duplicate() if again else residuals).take_arguments()
    followed.assert_called_once()
    stream, tensors = followed.call_args.args
    assert stream is built
    assert tensors is received
    assert received == [tensor]
