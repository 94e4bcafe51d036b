"""What the blocks of a model cost, and the cuts between them.

Limits of a plan: the memory of a rank and the links between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

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

    Raises:
        PlanError: a number that is negative or not finite.
    """

    forward: float
    backward_input: float
    backward_weight: float
    saved: float
    deferred: float
    parameters: float
    backward_alone: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check(f"{name} of a block", value)

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
        noise: by what share the seconds of all may be off: cuts whose steps differ by less are
            equally good.

    Raises:
        PlanError: no block, not one ``crossing`` and ``returning`` for each cut, or an impossible
            number.
    """

    blocks: tuple[BlockCost, ...]
    crossing: tuple[float, ...]
    call: float = 0.0
    returning: tuple[float, ...] | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name, sizes in (("crossing", self.crossing), ("returning", self.gradients)):
            if not self.blocks or len(sizes) != len(self.blocks) - 1:
                raise PlanError(
                    f"expected one or more blocks and the bytes over each cut between them, got "
                    f"{len(self.blocks)} blocks and {len(sizes)} cuts"
                )
            for size in sizes:
                _check(f"{name} of a cut", size)
        _check("call of a model", self.call)
        _check("noise of a model", self.noise)

    @property
    def gradients(self) -> tuple[float, ...]:
        """Bytes of the gradients that come back over each cut."""
        return self.crossing if self.returning is None else self.returning

    def stage(self, first: int, last: int) -> BlockCost:
        """What blocks ``first`` up to but not ``last`` cost as one stage.

        A first stage has no I, and keeps all it saved, with the gradient of its output, until W.

        Raises:
            PlanError: there are no such blocks.
        """
        if not 0 <= first < last <= len(self.blocks):
            raise PlanError(
                f"expected blocks first < last of 0 to {len(self.blocks)}, got {first} to {last}"
            )
        call = self.call
        whole = total([*self.blocks[first:last], BlockCost(call, call, call, 0, 0, 0, call)])
        if first > 0:
            return whole
        output = self.gradients[last - 1] if last < len(self.blocks) else 0.0
        return replace(
            whole,
            backward_input=0.0,
            backward_weight=whole.backward_alone,
            deferred=whole.saved + output,
        )


def total(blocks: Sequence[BlockCost]) -> BlockCost:
    """What all of them cost together."""
    return BlockCost(*map(math.fsum, zip(*map(astuple, blocks), strict=True)))


def average(found: Sequence[ModelCosts]) -> ModelCosts:
    """The mean of what several ranks found of the same model.

    Raises:
        PlanError: they do not have the same blocks.
    """
    if len({len(costs.blocks) for costs in found}) != 1:
        raise PlanError(
            "expected the costs of one model, got "
            f"{', '.join(str(len(costs.blocks)) for costs in found) or 'no'} blocks"
        )
    rows = zip(*(costs.blocks for costs in found), strict=True)
    blocks = (map(math.fsum, zip(*map(astuple, row), strict=True)) for row in rows)
    crossing = map(math.fsum, zip(*(costs.crossing for costs in found), strict=True))
    returning = map(math.fsum, zip(*(costs.gradients for costs in found), strict=True))
    count = len(found)
    return ModelCosts(
        tuple(BlockCost(*(value / count for value in sums)) for sums in blocks),
        tuple(size / count for size in crossing),
        math.fsum(costs.call for costs in found) / count,
        tuple(size / count for size in returning),
        max(costs.noise for costs in found),
    )


def _check(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise PlanError(f"{what} must be a finite number >= 0, got {value!r}")


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
