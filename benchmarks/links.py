"""How long messages between ranks take, in seconds of ``perf_counter``."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

import torch

from autosplit.mesh.costs import Link
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.ranks.groups import Groups

Pair = tuple[int, int]

_LARGE = 2**23  # bytes
_ROUNDS = 20
_WARMUP = 3


def ring(ranks: int) -> set[Pair]:
    """Each rank and the next, the last and the first; the lower one first."""
    steps = ((rank, (rank + 1) % ranks) for rank in range(ranks))
    return {(min(step), max(step)) for step in steps if ranks > 1}


def measure_transfer(groups: Groups, device: torch.device, pairs: Collection[Pair]) -> Transfer:
    """The links between these pairs of ranks, with the messages that a trainer's stages send.

    Each rank measures its pairs in one order that all have. Collective, between steps; all ranks
    get the same.

    Args:
        groups: of all ranks.
        device: where the messages live.
        pairs: of ranks, the lower one first, the same on every rank; without any, nothing is
            measured and nothing takes time.

    Returns:
        The slowest latency and bandwidth, for all of them; no ``message_bytes``.

    Raises:
        LostPeerError: some rank did not take part.
    """
    if not pairs:
        return Transfer()
    groups.connect(pairs)
    mine = {pair: _between(groups, device, pair) for pair in sorted(pairs) if groups.rank in pair}
    links = [link for found in groups.everybody.gather(mine) for link in found.values()]
    return Transfer(max(each.latency for each in links), min(each.bandwidth for each in links))


def _between(groups: Groups, device: torch.device, pair: Pair) -> Link:
    """By half of the quickest way there and back, of 1 byte and of many."""
    (peer,) = {*pair} - {groups.rank}

    def seconds(size: int) -> float:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        found = []
        for _ in range(_WARMUP + _ROUNDS):
            start = perf_counter()
            for sender in pair:
                work = (groups.isend if groups.rank == sender else groups.irecv)(tensor, peer)
                if work is not None:
                    with groups.as_lost_peer(groups.rank_name(peer)):
                        work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(perf_counter() - start)
        return min(found[_WARMUP:]) / 2.0

    small, large = seconds(1), seconds(_LARGE)
    return Link(small, _LARGE / max(large - small, 1e-9))
