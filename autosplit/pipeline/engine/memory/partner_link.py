"""Storages that travel between partner ranks, over process groups of their own.

The sizes go ahead, for they may depend on the data. Then comes one storage after the other: the
sender lets each go as soon as it has left, and the receiver makes room for it when its turn comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.device import settle
from autosplit.pipeline.engine.messages.process_groups import Groups, lost
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule

from .transferred_bytes import TransferredBytes

_LANE = "memory"


def partner_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """The pairs of ranks, the lower one first, between which storages travel."""
    ends = [(each.rank, each.partner) for each in journeys_of(schedule) if each.partner is not None]
    return {(min(pair), max(pair)) for pair in ends}


def connect_partners(groups: Groups, pairs: Collection[tuple[int, int]]) -> None:
    """Make ready for storages between these pairs; collective over all ranks.

    Raises:
        LostPeerError: some rank did not take part.
    """
    groups.connect(pairs, _LANE)


class PartnerLink:
    """This rank's end of the two lanes between it and its partner.

    Args:
        groups: the trainer's process groups, in which the two are connected.
        partner: the other rank.
        device: where storages lie.
        transferred: is told what comes and goes.
    """

    def __init__(
        self, groups: Groups, partner: int, device: torch.device, transferred: TransferredBytes
    ) -> None:
        self._transferred = transferred
        self._name = groups.named(partner)
        self._number = groups.number_in_pair(partner)
        self._timeout = groups.timeout
        self._device = device
        self._out = groups.between(groups.rank, partner, _LANE)
        self._in = groups.between(partner, groups.rank, _LANE)

    def send_sizes(self, storages: Sequence[Tensor], what: str) -> None:
        """Tell the partner what comes.

        Args:
            storages: what.
            what: whose they are, for errors.

        Raises:
            LostPeerError: it did not take that.
        """
        sizes = [tensor.numel() for tensor in storages]
        self._send(self._numbers([len(sizes)]), what)
        if sizes:
            self._send(self._numbers(sizes), what)

    def receive_sizes(self, what: str) -> list[int]:
        """Hear what comes; arguments and errors as for ``send_sizes``."""
        count = self._numbers([0])
        self._receive(count, what)
        sizes = self._numbers([0] * int(count))
        if len(sizes):
            self._receive(sizes, what)
        found: list[int] = sizes.tolist()
        return found

    def send(self, storages: list[Tensor], what: str) -> None:
        """Send storages; empties the list as they leave. Errors as for ``send_sizes``."""
        storages.reverse()
        while storages:
            self._send(storages[-1], what)
            self._transferred.change(-storages.pop().numel())

    def receive(self, sizes: Sequence[int], what: str, found: list[Tensor]) -> None:
        """Receive storages of these sizes into a list, in which each is from when there is room
        for it. Errors as for ``send_sizes``.
        """
        for size in sizes:
            self._transferred.change(size)
            found.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._receive(found[-1], what)

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _send(self, data: Tensor, what: str) -> None:
        self._run(self._out.send([data], self._number, 0), what)

    def _receive(self, data: Tensor, what: str) -> None:
        self._run(self._in.recv([data], self._number, 0), what)

    def _run(self, work: dist.Work | None, what: str) -> None:
        start = perf_counter()
        try:
            if work is not None:
                work.wait()
            settle(self._device)
        except RuntimeError as error:
            name = f"{self._name}, the partner for {what}"
            raise lost(name, perf_counter() - start, self._timeout, error) from error
