"""Limits of a plan: the memory of a rank and the links between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autosplit.errors import PlanError
from autosplit.pipeline.simulation.transfer import Transfer


@dataclass(frozen=True)
class Limits:
    """The memory of a rank, and the links between ranks.

    Attributes:
        cap: bytes that each rank may hold.
        optimizer_state: bytes for each byte of parameters; 2 for Adam, 0 for plain SGD.
        links: latency and bandwidth between ranks; its message bytes are not looked at, those of
            the cuts count.
        measures: whether what a schedule holds beyond the cap may go to the host's store (where
            ``links.host`` is known) or be made again.

    Raises:
        PlanError: numbers that cannot be.
    """

    cap: float = math.inf
    optimizer_state: float = 2.0
    links: Transfer = field(default_factory=Transfer)
    measures: bool = False

    def __post_init__(self) -> None:
        if not self.cap > 0.0:
            raise PlanError(f"cap must be bytes > 0 that a rank may hold, got {self.cap!r}")
        if not (math.isfinite(self.optimizer_state) and self.optimizer_state >= 0.0):
            raise PlanError(
                "optimizer_state must be bytes for each byte of parameters, a finite number >= 0; "
                f"got {self.optimizer_state!r}"
            )

    @property
    def factor(self) -> float:
        """Bytes that a rank holds all the time for each byte of parameters: these, their
        gradients, and what the optimizer keeps.
        """
        return 2.0 + self.optimizer_state
