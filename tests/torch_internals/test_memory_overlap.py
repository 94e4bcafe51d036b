"""Overlap of tensors in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autosplit.torch_internals.memory_overlap import overlaps

BASE = torch.zeros(6, 4)
BYTES = BASE.view(torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "groups"),
    [
        ([BASE[:3], BASE[3:], torch.zeros(2)], []),
        ([BASE[:, :2], BASE[:, 2:]], []),  # interleaved
        ([BASE[:3], BASE[0:0], BASE[2:], BASE.clone()], [[0, 2]]),
        ([BASE[:, :3], BASE[:, 2:]], [[0, 1]]),
        ([BASE[5], BYTES[5, 8:]], [[0, 1]]),  # another dtype, and so another offset
        ([torch.from_numpy(BASE.numpy()[:3]), torch.from_numpy(BASE.numpy()[2:])], [[0, 1]]),
    ],
)
def test_only_shared_elements_count(tensors: list[Tensor], groups: list[list[int]]) -> None:
    assert [sorted(group) for group in overlaps(tensors)] == groups
