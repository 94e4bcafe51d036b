"""What it costs to bring a result from one rank to another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import Action
from autosplit.pipeline.routes import boundary_of


@dataclass(frozen=True)
class Transfer:
    """Links between ranks: one in each direction, each carrying one message after the other.

    A message occupies its link for bytes / bandwidth and arrives ``latency`` after that.

    Attributes:
        latency: seconds.
        bandwidth: bytes in a second.
        message_bytes: bytes of one microbatch's activations at a boundary, and of their gradient:
            one number for all boundaries, or by the stage before the boundary one for all that it
            puts out, or one for each of its outputs.

    Raises:
        ScheduleError: a negative number, no bandwidth, or bytes that a bandwidth does not apply to.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: float | Mapping[int, float | Sequence[float]] = field(default=0.0)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0.0):
            raise ScheduleError(f"transfer must be finite seconds >= 0, got {self.latency!r}")
        if not self.bandwidth > 0.0:
            raise ScheduleError(f"bandwidth must be bytes in a second > 0, got {self.bandwidth!r}")
        for size in self._all_sizes():
            if not (math.isfinite(size) and size >= 0.0):
                raise ScheduleError(f"message_bytes must be finite numbers >= 0, got {size!r}")

    def occupies(self, result: Action) -> float:
        """Seconds for which ``result`` keeps its link.

        Raises:
            ScheduleError: the bytes of its boundary are not known.
        """
        size = self._after(boundary_of(result))
        return (sum(size) if isinstance(size, Sequence) else size) / self.bandwidth

    def occupies_with(self, stage: int, positions: Sequence[int], outputs: int) -> float:
        """Seconds for which a message keeps its link.

        Args:
            stage: whose outputs, or the gradients of whose outputs.
            positions: which of them.
            outputs: how many there are.

        Raises:
            ScheduleError: the bytes of these outputs are not known.
        """
        size = self._after(stage)
        if not isinstance(size, Sequence):
            size = [size] if size else [0.0] * outputs
        if len(size) != outputs:
            raise ScheduleError(
                f"stage {stage} puts out {outputs} tensors, and a wiring says which of them go "
                f"where: expected the message_bytes of each, got {self._after(stage)!r}"
            )
        return sum(size[position] for position in positions) / self.bandwidth

    def _after(self, stage: int) -> float | Sequence[float]:
        """The bytes of what a stage puts out."""
        sizes = self.message_bytes
        if not isinstance(sizes, Mapping):
            return sizes
        if stage not in sizes:
            raise ScheduleError(
                f"no message_bytes for the boundary after stage {stage}; known: {sorted(sizes)}"
            )
        return sizes[stage]

    def _all_sizes(self) -> Iterator[float]:
        sizes = self.message_bytes
        for size in sizes.values() if isinstance(sizes, Mapping) else (sizes,):
            yield from size if isinstance(size, Sequence) else (size,)
