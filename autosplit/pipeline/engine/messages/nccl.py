"""What NCCL's communicators need that Gloo's connections do not: a first message each, waits that
end when another rank fails, and a common end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from autosplit.pipeline.engine.faults.first_error import Guard

    from .process_groups import PointToPoint


def greet(link: PointToPoint, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Exchange a first message each way between pairs of ranks, in one order on all ranks.

    NCCL connects two ranks at their first message, and the host waits for the other end. In a
    step the one would wait where it posts a receive, and the other, which has yet to compute what
    it sends, where it posts one for the other direction.
    """
    for low, high in pairs:
        for source, target in ((low, high), (high, low)):
            if link.rank not in (source, target):
                continue
            tensor = torch.zeros(1, device=device)
            sends = link.rank == source
            work = link.isend(tensor, target) if sends else link.irecv(tensor, source)
            if work is not None:
                work.wait()


def await_device(device: torch.device, guard: Guard, timeout: float) -> None:
    """Wait on the host until a GPU has done what it was given so far. Whoever then reads a number
    from it does not wait, which nothing would end if a message on the device never came.

    Raises:
        LostPeerError: another rank failed, or ``timeout`` seconds passed.
    """
    if device.type == "cuda":
        guard.wait(torch.cuda.current_stream(device).query, timeout)


class Abortable(Protocol):
    """What ``abort`` ends."""

    def abort(self) -> None: ...


def abort(groups: Sequence[Abortable]) -> None:
    """End what is under way over some NCCL groups, all at once: ending one waits for the device,
    on which a message of another hangs until that is ended.
    """
    if groups:
        with ThreadPoolExecutor(len(groups), "autosplit-abort") as pool:
            for each in [pool.submit(group.abort) for group in groups]:
                each.result()
