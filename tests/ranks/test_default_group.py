"""Ranks of one start find each other in a store that is full of earlier ones; other hosts reach no
socket of ranks that are all on one machine.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from autosplit.errors import PipelineError
from autosplit.ranks.default_group import agree_on_attempt, on_loopback
from tests.ranks import sockets

SOON = timedelta(seconds=30)


def started(store: dist.HashStore, ranks: list[int], world: int = 3) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(agree_on_attempt, store, rank, world, SOON) for rank in ranks]
        return [call.result() for call in calls]


def test_a_start_has_one_name_and_no_earlier_one() -> None:
    store = dist.HashStore()
    names = [started(store, [0, 1, 2]), started(store, [2, 1, 0]), started(store, [1, 0, 2])]
    assert [len({*name}) for name in names] == [1, 1, 1]
    assert len({name[0] for name in names}) == 3


def test_ranks_that_ended_before_all_had_started_are_not_waited_for() -> None:
    """Rank 1 left a token that nobody answered; rank 0 answered rank 2, and ended."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=200))
    with pytest.raises(dist.DistStoreError):
        agree_on_attempt(store, 1, 3, SOON)
    store.set_timeout(SOON)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(agree_on_attempt, store, 2, 3, SOON)
        with pytest.raises(
            PipelineError,
            match=r"^ranks 1 of 3 did not start within 0.5 s: see whether .* timeout=\nMore: ",
        ):
            agree_on_attempt(store, 0, 3, timedelta(seconds=0.5))
        former = other.result()
    (name,) = {*started(store, [0, 1, 2])}
    assert name != former


def test_a_socket_that_other_hosts_reach_is_seen() -> None:
    assert [*map(sockets.loopback, ["127.0.0.1:1", "0.0.0.0:1", "10.1.2.3:1"])] == [True] + [
        False
    ] * 2


def test_an_interface_that_the_user_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        assert os.environ["NCCL_SOCKET_IFNAME"].startswith("=lo")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
