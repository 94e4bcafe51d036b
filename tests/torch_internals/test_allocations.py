from __future__ import annotations

import pytest
import torch
from torch.autograd import profiler

from autosplit.errors import AutosplitError
from autosplit.torch_internals.allocations import HostAllocations, Stretch

KIB = 1024


def kibibytes(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_levels_are_true_to_the_byte_and_seen_inside_operators() -> None:
    earlier = kibibytes(8)
    reference = kibibytes(4)
    with HostAllocations() as allocations:
        early = kibibytes(2)  # before the first mark
        assert allocations.mark() == 0
        kept = kibibytes(3)
        del early
        allocations.mark()
        dropped = kibibytes(5)
        del dropped, reference  # older memory does not count
        allocations.mark()
    # A sort makes values and indices of 8 bytes, which the expression lets go of.
    with HostAllocations() as inside:
        inside.mark()
        values = earlier.sort().values
    assert allocations.stretches() == [
        Stretch(3 * KIB, 1 * KIB),
        Stretch(6 * KIB, 1 * KIB),
        Stretch(1 * KIB, 1 * KIB),
    ]
    assert inside.stretches()[0].end == 8 * KIB
    assert inside.stretches()[0].highest >= 8 * KIB + 8 * 8 * KIB
    assert len(kept) + len(values) == 11 * KIB


def test_without_a_mark_there_is_nothing() -> None:
    with HostAllocations() as allocations:
        kibibytes(1)
    assert allocations.stretches() == []


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with HostAllocations() as allocations:
        allocations.mark()
    assert capfd.readouterr() == ("", "")


def test_there_is_one_profiler_at_a_time() -> None:
    with (
        profiler.profile(),
        pytest.raises(AutosplitError, match="a profiler is running in this process"),
        HostAllocations(),
    ):
        pass
