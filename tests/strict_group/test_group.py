"""Ranks under the rules of NCCL: what ends, what does not, and what is said of that."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.kept_ranks import Ranks
from tests.pipeline.validation.reported import CASES

from . import Settings
from .group import over
from .link import StrictError
from .mutations import case
from .performer import perform_all
from .player import play

SLOW = timedelta(seconds=60)


def both(rank: int, group: dist.ProcessGroup) -> list[dist.P2POp]:
    """A message each way."""
    sent, got = torch.full((3,), float(rank)), torch.zeros(3)
    return [
        dist.P2POp(dist.isend, sent, 1 - rank, group),
        dist.P2POp(dist.irecv, got, 1 - rank, group),
    ]


def message(rank: int, group: dist.ProcessGroup) -> None:
    tensor = torch.arange(4.0) if rank == 0 else torch.zeros(4)
    if rank == 0:
        dist.send(tensor, 1, group)
    else:
        dist.recv(tensor, 0, group)
    assert tensor.tolist() == [0, 1, 2, 3]


def batch(rank: int, group: dist.ProcessGroup) -> None:
    """Both ways at once, which one by one would never end, in one work."""
    operations = both(rank, group)
    (work,) = dist.batch_isend_irecv(operations)
    work.wait()
    assert operations[1].tensor.tolist() == [1.0 - rank] * 3


def collectives(rank: int, group: dist.ProcessGroup) -> None:
    """Called from Python, by the dispatcher, asynchronously, on objects, coalesced."""
    total = torch.full((2,), rank + 1.0)
    work = dist.all_reduce(total, group=group, async_op=True)
    assert work is not None
    assert work.get_future().wait()[0].tolist() == [3, 3]
    assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [2, 2]
    scattered, gathered = torch.empty(1), torch.empty(2)
    dist.reduce_scatter_tensor(scattered, torch.arange(2.0), group=group)
    dist.all_gather_into_tensor(gathered, scattered, group=group)
    assert gathered.tolist() == [0, 2]
    swapped = torch.empty(2)
    dist.all_to_all_single(swapped, torch.arange(2.0) + 10 * rank, group=group)
    assert swapped.tolist() == [rank, rank + 10]
    message: list[object] = [None, None]
    dist.all_gather_object(message, {"rank": rank}, group)
    assert message == [{"rank": 0}, {"rank": 1}]
    dist.barrier(group)


def cycle(rank: int, group: dist.ProcessGroup) -> None:
    """Each sends first, and a send is not over before its receive has begun."""
    with pytest.raises(StrictError, match="wait for each other") as raised:
        dist.send(torch.ones(1), 1 - rank, group)
    message = str(raised.value)
    assert message.index("rank 0: send to 1") < message.index("rank 1: send to 0")
    assert "rank 1: waits for send to 0 (#" in message


def made(rank: int, group: dist.ProcessGroup) -> None:
    """Two communicators, first used in two orders."""
    remaining = [dist.new_group([0, 1], timeout=SLOW) for _ in range(2)]
    with pytest.raises(StrictError, match=r"making '\d+' of ranks 0, 1  <-- waits for"):
        dist.all_reduce(torch.ones(1), group=remaining[rank])


def kinds(rank: int, group: dist.ProcessGroup) -> None:
    call = (dist.all_reduce, dist.broadcast)[rank]
    with pytest.raises(StrictError, match=r"allreduce \(#.*\n.*broadcast"):
        call(torch.ones(1), *[0] * rank, group=group)


def sizes(rank: int, group: dist.ProcessGroup) -> None:
    call = (dist.send, dist.recv)[rank]
    with pytest.raises(StrictError, match="rank 0 has 4, rank 1 has 8"):
        call(torch.ones(1 + rank), 1 - rank, group)


def aborted(rank: int, group: dist.ProcessGroup) -> None:
    """Whoever waits for a rank that has aborted the group hears of it."""
    if rank == 0:
        group.abort()
        return
    with pytest.raises(StrictError, match="Connection closed by peer: rank 0 has left, as it has"):
        dist.recv(torch.ones(1), 0, group)


def elsewhere(rank: int, group: dist.ProcessGroup) -> None:
    """A rank that computes for long, or waits in a thread that waits for nobody, is no cycle."""
    if rank == 0:
        time.sleep(0.5)
        dist.send(torch.ones(1), 1, group)
    else:
        dist.recv(torch.ones(1), 0, group)


WELL = ("message", "batch", "collectives", "elsewhere", "sizes")
ENDING = ("cycle", "made", "kinds", "aborted")


def one_by_one(text: str, *names: str) -> list[str]:
    """Run some of these in one process group; what it is."""
    with over(text):
        world = dist.group.WORLD
        assert world is not None
        for name in names:
            globals()[name](dist.get_rank(), world)
        return [type(world).__name__, dist.get_backend()]


@pytest.mark.parametrize(
    "text", ["strict", "strict:ms=5,seed=1", "strict:eager=1,one_connection=1"]
)
def test_programs_that_end(on_ranks: Ranks, text: str) -> None:
    assert on_ranks(one_by_one, 2, (text, *WELL), timeout=90) == [["StrictGroup", "strict"]] * 2


@pytest.mark.parametrize("name", ENDING)
def test_a_program_that_never_ends_is_an_error_at_once(on_ranks: Ranks, name: str) -> None:
    on_ranks(one_by_one, 2, ("strict", name), timeout=30)


@pytest.mark.parametrize("one", [False, True])
def test_running_ranks_are_judged_as_written_queues_are(on_ranks: Ranks, one: bool) -> None:
    text = str(Settings(ms=2, seed=3, one_connection=one))
    cases = {seed: case(seed) for seed in range(60)}
    cases = dict([(at, item) for at, item in cases.items() if len(item[0]) == 2][:12])
    verdicts = {at: play(*item, one_connection=one).ends for at, item in cases.items()}
    assert {*verdicts.values()} == {True, False}
    _judged(on_ranks(perform_all, 2, (cases, text), timeout=90), verdicts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_reported_programs_hang_and_their_repairs_end(on_ranks: Ranks, ranks: int) -> None:
    cases = {name: item for name, item in CASES.items() if len(item.program) == ranks}
    programs = {name: (item.program, item.communicators) for name, item in cases.items()}
    verdicts = {name: item.ends for name, item in cases.items()}
    assert {name: play(*item).ends for name, item in programs.items()} == verdicts
    _judged(on_ranks(perform_all, ranks, (programs, "strict"), timeout=90), verdicts)


def _judged(found: list[dict[Any, str]], verdicts: dict[Any, bool]) -> None:
    """Every rank has come to its end, or says why not, as was judged."""
    for item in found:
        assert {name: message == "ends" for name, message in item.items()} == verdicts, item
        assert all(
            message == "ends" or "wait for each other" in message for message in item.values()
        )
