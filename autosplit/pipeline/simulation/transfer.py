"""What it costs to bring a result from one rank to another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link


@dataclass(frozen=True)
class Transfer:
    """Links between ranks: one in each direction, each carrying one message after the other.

    A message occupies its link for bytes / bandwidth and arrives ``latency`` after that. What moves
    between partners (see ``Schedule.partner``) goes over the same links, in turns of its own: it
    is not simulated that it slows messages down, or they it.

    Attributes:
        latency: seconds.
        bandwidth: bytes in a second.
        message_bytes: bytes of one microbatch's activations, and of their gradients: one number for
            all boundaries, or by the stage before the boundary.
        host: one link each way between every rank and its store on the host; None: they cost
            nothing.

    Raises:
        ScheduleError: a negative number, or no bandwidth.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: float | Mapping[int, float] = 0.0
    host: Link | None = None

    def __post_init__(self) -> None:
        for latency, bandwidth in (Link(self.latency, self.bandwidth), self.host or Link()):
            if not (math.isfinite(latency) and latency >= 0.0):
                raise ScheduleError(f"transfer must be finite seconds >= 0, got {latency!r}")
            if not bandwidth > 0.0:
                raise ScheduleError(f"bandwidth must be bytes in a second > 0, got {bandwidth!r}")
        sizes = self.message_bytes
        for size in sizes.values() if isinstance(sizes, Mapping) else [sizes]:
            if not (math.isfinite(size) and size >= 0.0):
                raise ScheduleError(f"message_bytes must be finite numbers >= 0, got {size!r}")

    def seconds(self, boundary: int) -> float:
        """For how long a message over the boundary after a stage keeps its link.

        Raises:
            ScheduleError: its bytes are not known.
        """
        sizes = self.message_bytes
        if not isinstance(sizes, Mapping):
            return sizes / self.bandwidth
        if boundary not in sizes:
            raise ScheduleError(
                f"no message_bytes for the boundary after stage {boundary}; known: {sorted(sizes)}"
            )
        return sizes[boundary] / self.bandwidth
