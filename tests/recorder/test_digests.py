"""Digests differ for any changed bit, and are equal for equal bits."""

import weakref
from unittest import mock

import pytest
import torch

from autosplit.pipeline.schedule.schedule import Action
from autosplit.recorder.digests import PendingDigests, digest
from autosplit.recorder.tape import StepTape

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (), (1,)])
def test_every_bit_of_a_tensor_counts(dtype, shape):
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    original, raw = digest(tensor), tensor.reshape(-1).view(torch.uint8)
    for place in range(raw.numel()):
        for bit in (1, 16, 128) if dtype is not torch.bool else (1,):
            raw[place] ^= bit
            assert digest(tensor).mark != original.mark
            raw[place] ^= bit
    assert digest(tensor) == original


def test_a_digest_depends_on_logical_order_and_not_on_strides():
    tensor = torch.randn(6, 4)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    unaligned = torch.cat([torch.zeros(1), tensor.view(-1)])[1:].view(6, 4)
    assert digest(unaligned) == digest(tensor)
    exchanged = tensor.flip(0)
    assert digest(exchanged) != digest(tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_numbers_that_are_not_finite_are_seen(value, dtype):
    tensor = torch.zeros(1000, dtype=dtype)
    assert digest(tensor).finite
    tensor[713] = value
    assert not digest(tensor).finite


def test_the_largest_finite_numbers_are_finite():
    assert digest(torch.full((100,), torch.finfo(torch.float32).min)).finite


def test_pending_digests_keep_no_tensor_and_skip_missing_ones():
    tensor, empty = torch.randn(8), torch.empty(0)
    expected = digest(tensor)
    pending = PendingDigests([None, tensor, empty])
    tensor.zero_()
    first, second, third = pending.read()
    assert (first, second) == (None, expected)
    assert third == digest(empty)
    assert PendingDigests([]).read() == []


def test_a_sparse_tensor_has_a_digest_of_its_values():
    sparse = torch.eye(3).to_sparse()
    assert digest(sparse).mark == digest(torch.ones(3)).mark


def test_digests_do_not_depend_on_the_tensors_beside_them():
    tensors = [torch.randn(3, 50), torch.tensor(2.5), None, torch.arange(6), torch.randn(128, 4)]
    pending = PendingDigests(tensors[:2])
    places = pending.queue(tensors[2:], finite=False)
    digests = pending.read()
    assert digests[:2] == [digest(tensors[0]), digest(tensors[1])]
    expected = [t if t is None else digest(t)._replace(finite=None) for t in tensors[2:]]
    assert digests[places] == expected


def test_few_tensors_wait_for_their_digests():
    flags = {"reduces": False, "scales": False}
    tape = StepTape(1, {}, {}, (), 1 << 30, mock.Mock(), torch.device("cpu"), **flags)
    backward, taken, given = Action.parse("0B0"), torch.ones(3), torch.zeros(5 << 18)
    tape.note_arguments(backward, [taken])
    alive, expected = weakref.ref(given), digest(given)
    tape.note_results(backward, [given, None])
    del given
    assert alive() is None
    tape.end([])
    row = tape.record()["actions"]["0B0"]
    assert row == {"took": [digest(taken)._replace(finite=None)], "gave": [expected, None]}
