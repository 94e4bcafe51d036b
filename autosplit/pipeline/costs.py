"""What the actions of a pipeline cost: seconds, what is kept, and the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.memory import StageMemory
from autosplit.pipeline.transfer import Transfer


@dataclass(frozen=True)
class Costs:
    """The costs of every stage.

    Attributes:
        times: per stage, seconds of F, I and W.
        memory: per stage, what it keeps of a microbatch.
        transfer: the links between ranks.
        full: per stage, seconds of a B; None: as long as I and W.

    Raises:
        ScheduleError: no stage, or times, memory and full of different numbers of stages.
    """

    times: Sequence[tuple[float, float, float]]
    memory: Sequence[StageMemory]
    transfer: Transfer = field(default_factory=Transfer)
    full: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.times or len(self.times) != len(self.memory):
            raise ScheduleError(
                f"expected times and memory of each stage, got {len(self.times)} times and "
                f"{len(self.memory)} memories"
            )
        if self.full is not None and len(self.full) != len(self.times):
            raise ScheduleError(
                f"expected the seconds of a B of each of {len(self.times)} stages, got "
                f"{len(self.full)}"
            )

    def cut(self, chunks: int) -> Costs:
        """The same with each stage cut into ``chunks`` equal ones."""
        times = [(f / chunks, i / chunks, w / chunks) for f, i, w in self.times]
        memory = [StageMemory(m.saved / chunks, m.deferred / chunks) for m in self.memory]
        return Costs(
            [each for each in times for _ in range(chunks)],
            [each for each in memory for _ in range(chunks)],
            self.transfer,
            self.full and [each / chunks for each in self.full for _ in range(chunks)],
        )

    def seconds(self, action: Action) -> float:
        """How long ``action`` takes."""
        forward, inputs, weights = self.times[action.stage]
        if action.kind is ActionKind.FORWARD:
            return forward
        if action.kind is ActionKind.BACKWARD_INPUT:
            return inputs
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return weights
        return inputs + weights if self.full is None else self.full[action.stage]
