"""What the blocks of a model cost, and the cuts between them.

And the limits of a plan: the memory of a rank and the links between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from statistics import fmean

from autosplit.errors import PlanError
from autosplit.pipeline.simulation.transfer import Transfer


@dataclass(frozen=True)
class BlockCost:
    """One block, or several in one stage, for one microbatch.

    Attributes:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W.
        saved: bytes kept from F to the backward.
        deferred: bytes kept from I to W.
        parameters: bytes of parameters.
        backward_alone: seconds of the backward within the first stage of a pipeline, whose W is
            the whole backward: of the first block without a gradient of its input, of another
            block I and W in one.
    """

    forward: float
    backward_input: float
    backward_weight: float
    saved: float
    deferred: float
    parameters: float
    backward_alone: float

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds of F, I and W."""
        return (self.forward, self.backward_input, self.backward_weight)


@dataclass(frozen=True)
class ModelCosts:
    """All blocks of a model in order.

    Attributes:
        blocks: the blocks.
        crossing: bytes that go over the cut after each block but the last, for one microbatch.
        call: seconds that each of F, I and W of a stage takes besides its blocks.
        returning: bytes of the gradients that come back over each cut; None: as many as went.
    """

    blocks: tuple[BlockCost, ...]
    crossing: tuple[float, ...]
    call: float = 0.0
    returning: tuple[float, ...] | None = None

    @property
    def gradients(self) -> tuple[float, ...]:
        """Bytes of the gradients that come back over each cut."""
        return self.crossing if self.returning is None else self.returning

    @cached_property
    def _fields(self) -> list[tuple[float, ...]]:
        """Those of ``BlockCost``, of all blocks each."""
        return [*zip(*map(astuple, self.blocks), strict=True)]

    def stage(self, first: int, last: int) -> BlockCost:
        """What blocks ``first`` up to but not ``last`` cost as one stage.

        A first stage has no I, and keeps all it saved, with the gradient of its output, until W,
        which is the whole backward; nothing crosses the end of the model.
        """
        forward, inputs, weights, saved, deferred, parameters, alone = (
            sum(each[first:last]) for each in self._fields
        )
        if first == 0:
            inputs, weights = -self.call, alone
            deferred = saved + (self.gradients[last - 1] if last < len(self.blocks) else 0.0)
        forward, inputs, weights, alone = (
            each + self.call for each in (forward, inputs, weights, alone)
        )
        return BlockCost(forward, inputs, weights, saved, deferred, parameters, alone)


def average(found: Sequence[ModelCosts]) -> ModelCosts:
    """The mean of what several ranks found of the same model."""

    def means(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return tuple(map(fmean, zip(*rows, strict=True)))

    ranks = zip(*(costs.blocks for costs in found), strict=True)
    return ModelCosts(
        tuple(BlockCost(*means(map(astuple, row))) for row in ranks),
        means(costs.crossing for costs in found),
        fmean(costs.call for costs in found),
        means(costs.gradients for costs in found),
    )


@dataclass(frozen=True)
class Limits:
    """The memory of a rank, and the links between ranks.

    Attributes:
        cap: bytes that each rank may hold.
        optimizer_state: bytes for each byte of parameters; 2 for Adam, 0 for plain SGD.
        links: latency and bandwidth between ranks; its message bytes are not looked at, those of
            the cuts count.
        measures: whether what a schedule holds beyond the cap is left to a trainer, which is given
            it as its limit, and moves or makes again what is too much.

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
