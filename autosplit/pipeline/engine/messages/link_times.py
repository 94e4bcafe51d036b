"""How long messages between ranks take."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.mesh.link import Link
from autosplit.pipeline.simulation.transfer import Transfer

from .process_groups import Groups

Pair = tuple[int, int]

_LARGE = 2**23  # bytes
_ROUNDS = 20
_WARMUP = 3
_SUMS = 5


def ring(ranks: int) -> set[Pair]:
    """Each rank and the next, the last and the first; the lower one first."""
    steps = ((rank, (rank + 1) % ranks) for rank in range(ranks))
    return {(min(step), max(step)) for step in steps if ranks > 1}


def measure_transfer(groups: Groups, device: torch.device, pairs: Collection[Pair]) -> Transfer:
    """The links between these pairs of ranks, with the messages that a trainer's stages send.

    Pairs that have no rank in common are measured at once. Collective, between steps; all ranks
    get the same.

    Args:
        groups: of all ranks.
        device: where the messages live.
        pairs: of ranks, the lower one first, the same on every rank; without any, nothing is
            measured and nothing takes time.

    Returns:
        A link for each pair, the slowest latency and bandwidth for all others, no
        ``message_bytes``.

    Raises:
        LostPeerError: some rank did not take part.
    """
    if not pairs:
        return Transfer()
    groups.connect(pairs)
    links: dict[Pair, Link] = {}
    for at_once in _apart(pairs):
        mine = {pair: _link(groups, device, pair) for pair in at_once if groups.rank in pair}
        for found in groups.everybody.gather(mine):
            links = found | links  # of a pair's two ranks the lower one says, of replicas the first
    latency = max(link.latency for link in links.values())
    bandwidth = min(link.bandwidth for link in links.values())
    return Transfer(latency, bandwidth, pairs=links)


def measure_sum(groups: Groups, device: torch.device, link: dist.ProcessGroup) -> Link:
    """How long the ranks of a group take to sum up tensors: the slowest of all such groups.

    Collective over all ranks, each of which is in one of the groups; all get the same.

    Raises:
        LostPeerError: some rank did not take part.
    """
    small, large = (
        _of_sum(groups, torch.zeros(size, device=device), link) for size in (1, _LARGE // 4)
    )
    heard: list[Link] = groups.everybody.gather(Link(small, _LARGE / max(large - small, 1e-9)))
    return Link(max(each.latency for each in heard), min(each.bandwidth for each in heard))


def _of_sum(groups: Groups, tensor: Tensor, link: dist.ProcessGroup) -> float:
    seconds = []
    for _ in range(_WARMUP + _SUMS):
        start = time.perf_counter()
        with groups.losing("the replicas"):
            dist.all_reduce(tensor, group=link)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[_WARMUP:])


def _apart(pairs: Collection[Pair]) -> list[list[Pair]]:
    """The pairs in few groups, in none of which two have a rank in common."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs):
        for group in found:
            if not any({*pair} & {*other} for other in group):
                group.append(pair)
                break
        else:
            found.append([pair])
    return found


def _link(groups: Groups, device: torch.device, pair: Pair) -> Link:
    small, large = (
        _one_way(groups, pair, torch.zeros(size, dtype=torch.uint8, device=device))
        for size in (1, _LARGE)
    )
    return Link(small, _LARGE / max(large - small, 1e-9))


def _one_way(groups: Groups, pair: Pair, tensor: Tensor) -> float:
    """Seconds from one rank of the pair to the other: half of the quickest way there and back."""
    (peer,) = {*pair} - {groups.rank}
    seconds = []
    for _ in range(_WARMUP + _ROUNDS):
        start = time.perf_counter()
        for sender in pair:
            send = groups.isend if groups.rank == sender else groups.irecv
            work = send(tensor, peer)
            if work is not None:
                with groups.losing(groups.named(peer)):
                    work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[_WARMUP:]) / 2.0
