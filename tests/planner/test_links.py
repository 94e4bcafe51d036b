"""Measuring links takes processes."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autosplit.ranks.groups import Groups
from benchmarks.links import measure_transfer, ring
from tests.kept_ranks import ranks

_LATE = 0.02  # seconds; a message between two processes of one machine takes a thousandth of it


def test_a_ring_has_each_rank_and_the_next_and_the_last_and_the_first() -> None:
    assert ring(1) == set()
    assert ring(2) == {(0, 1)}
    assert ring(4) == {(0, 1), (1, 2), (2, 3), (0, 3)}


@ranks(3)
def test_the_slowest_link_is_that_of_all_and_all_ranks_know_it() -> None:
    device = torch.device("cpu")
    groups = Groups(3, device, 30.0)
    send = groups.isend

    def late(tensor: torch.Tensor, peer: int) -> Any:
        if {dist.get_rank(), peer} == {1, 2}:
            time.sleep(_LATE)
        return send(tensor, peer)

    with mock.patch.object(groups, "isend", late):
        result = measure_transfer(groups, device, ring(3))
    remaining: list[Any] = [None] * 3
    dist.all_gather_object(remaining, result)
    groups.destroy()
    assert remaining == [result] * 3
    assert result.latency >= _LATE
