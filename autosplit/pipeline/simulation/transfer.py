"""What it costs to bring a result from one rank to another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.routes import Parcel

Bytes = float | Mapping[int, float | Sequence[float]]
"""Of one microbatch at each boundary: one number for all, or by the stage before the boundary one
for all its outputs, or one for each.
"""


@dataclass(frozen=True)
class Transfer:
    """Links between ranks: one in each direction, each carrying one message after the other.

    A message occupies its link for bytes / bandwidth and arrives ``latency`` after that. What moves
    between partners (see ``Schedule.partner``) goes over the same links, in turns of its own: it
    is not simulated that it slows messages down, or they it.

    Attributes:
        latency: seconds.
        bandwidth: bytes in a second.
        message_bytes: bytes of activations.
        gradient_bytes: bytes of their gradients; an output that needs none, such as a mask, has 0.
            None: as many as the activations have.
        pairs: links that differ from that, by the two ranks that they join, the lower one first.
        host: one link each way between every rank and its store on the host; None: they cost
            nothing.

    Raises:
        ScheduleError: a negative number, no bandwidth, or bytes that a bandwidth does not apply to.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: Bytes = field(default=0.0)
    gradient_bytes: Bytes | None = None
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    host: Link | None = None

    def __post_init__(self) -> None:
        links = Link(self.latency, self.bandwidth), *self.pairs.values(), self.host or Link()
        for latency, bandwidth in links:
            if not (math.isfinite(latency) and latency >= 0.0):
                raise ScheduleError(f"transfer must be finite seconds >= 0, got {latency!r}")
            if not bandwidth > 0.0:
                raise ScheduleError(f"bandwidth must be bytes in a second > 0, got {bandwidth!r}")
        for one, other in self.pairs:
            if not 0 <= one < other:
                raise ScheduleError(
                    f"a link joins two ranks, the lower one first; got ({one}, {other})"
                )
        for name in ("message_bytes", "gradient_bytes"):
            for size in _all_sizes(getattr(self, name)):
                if not (math.isfinite(size) and size >= 0.0):
                    raise ScheduleError(f"{name} must be finite numbers >= 0, got {size!r}")

    def link(self, one: int, other: int) -> Link:
        """The link between two ranks."""
        pair = (one, other) if one < other else (other, one)
        return self.pairs.get(pair) or Link(self.latency, self.bandwidth)

    def bytes_of(
        self, parcel: Parcel, positions: Sequence[int] | None = None, outputs: int = 0
    ) -> float:
        """The bytes of a parcel.

        Args:
            parcel: outputs of a stage, or gradients of its outputs.
            positions: which of them; None: all, where each stage feeds the next.
            outputs: how many that stage has.

        Raises:
            ScheduleError: the bytes of its boundary, or of these outputs, are not known.
        """
        name, sizes = "message_bytes", self.message_bytes
        if not parcel.forward and self.gradient_bytes is not None:
            name, sizes = "gradient_bytes", self.gradient_bytes
        if not isinstance(sizes, Mapping):
            sizes = {parcel.boundary: sizes}
        if parcel.boundary not in sizes:
            raise ScheduleError(
                f"no {name} for the boundary after stage {parcel.boundary}; known: {sorted(sizes)}"
            )
        size = sizes[parcel.boundary]
        given = size if isinstance(size, Sequence) else [size]
        if positions is None:
            return sum(given)
        if size == 0.0:
            return 0.0
        if len(given) != outputs:
            raise ScheduleError(
                f"stage {parcel.boundary} puts out {outputs} tensors, and a wiring says which of "
                f"them go where: expected the {name} of each, got {size!r}"
            )
        return sum(given[position] for position in positions)


def _all_sizes(sizes: Bytes | None) -> Iterator[float]:
    if isinstance(sizes, Mapping):
        for size in sizes.values():
            yield from size if isinstance(size, Sequence) else (size,)
    elif sizes is not None:
        yield sizes
