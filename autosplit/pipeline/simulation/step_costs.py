"""What a step of a pipeline costs, whatever its schedule: seconds, what is kept, the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring

from .activation_memory import StageMemory, memory_over_time
from .early_weights import Slices
from .reductions import Reductions
from .simulate import simulate
from .timeline import Timeline
from .transfer import Transfer


@dataclass(frozen=True)
class Costs:
    """The costs of every stage, and how the trainer runs them.

    Attributes:
        times: per stage, seconds of F, I and W.
        memory: per stage, what it keeps of a microbatch.
        transfer: the links between ranks.
        full: per stage, seconds of a B; None: as long as I and W.
        wiring: who feeds whom; None: each stage the next.
        early_weights: whether Ws run in every wait, as a trainer's ``early_weights`` has them.
        slices: how Ws are cut for that, see ``simulate``.
        reductions: what replicas of the pipeline reduce; None: there is one pipeline.
        gathers: per stage, seconds of an UNSHARD; None: they take no time.

    Raises:
        ScheduleError: no stage; times, memory, full, gathers and wiring of different numbers of
            stages; or slices without ``early_weights``.
    """

    times: Sequence[tuple[float, float, float]]
    memory: Sequence[StageMemory]
    transfer: Transfer = field(default_factory=Transfer)
    full: Sequence[float] | None = None
    wiring: Wiring | None = None
    early_weights: bool = False
    slices: Slices = 1
    reductions: Reductions | None = None
    gathers: Sequence[float] | None = None

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
        if self.gathers is not None and len(self.gathers) != len(self.times):
            raise ScheduleError(
                f"expected the seconds of an UNSHARD of each of {len(self.times)} stages, got "
                f"{len(self.gathers)}"
            )
        if self.wiring is not None and self.wiring.stages != len(self.times):
            raise ScheduleError(
                f"expected the wiring of {len(self.times)} stages, got that of {self.wiring.stages}"
            )
        if self.slices != 1 and not self.early_weights:
            raise ScheduleError(f"slices={self.slices!r} has no effect without early_weights=True")

    def cut(self, chunks: int) -> Costs:
        """The same with each stage cut into ``chunks`` equal ones.

        Raises:
            ScheduleError: a wiring, or seconds of slices, which belong to the stages as they are.
        """
        if chunks == 1:
            return self
        if self.wiring is not None or not isinstance(self.slices, int):
            raise ScheduleError(
                "stages with a wiring, or with the seconds of each slice, cannot be cut further"
            )
        times = [(f / chunks, i / chunks, w / chunks) for f, i, w in self.times]
        memory = [
            StageMemory(
                m.saved / chunks,
                m.deferred / chunks,
                m.inputs,
                tensors=max(m.tensors // chunks, 1),
                workspace=m.workspace,
            )
            for m in self.memory
        ]
        return Costs(
            [each for each in times for _ in range(chunks)],
            [each for each in memory for _ in range(chunks)],
            self.transfer,
            self.full and [each / chunks for each in self.full for _ in range(chunks)],
            early_weights=self.early_weights,
            slices=self.slices,
            reductions=self.reductions
            and replace(
                self.reductions,
                bytes=[each / chunks for each in self.reductions.bytes for _ in range(chunks)],
            ),
            gathers=self.gathers
            and [each / chunks for each in self.gathers for _ in range(chunks)],
        )

    def seconds(self, action: Action) -> float:
        """How long ``action`` takes."""
        if action.kind.is_sharding:
            gathers = self.gathers if action.kind is ActionKind.UNSHARD else None
            return 0.0 if gathers is None else gathers[action.stage]
        forward, inputs, weights = self.times[action.stage]
        if action.kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE):
            return forward
        if action.kind is ActionKind.BACKWARD_INPUT:
            return inputs
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return weights
        return inputs + weights if self.full is None else self.full[action.stage]

    def timeline(self, schedule: Schedule) -> Timeline:
        """A step of ``schedule``.

        Raises:
            ScheduleError: it deadlocks, or something that it needs is not known; see ``simulate``.
        """
        return simulate(
            schedule,
            self.seconds,
            transfer=self.transfer,
            wiring=self.wiring,
            early_weights=self.early_weights,
            slices=self.slices,
            memory=self.memory,
            reductions=self.reductions,
            gathers=self.gathers,
        )

    def peaks(self, schedule: Schedule, timeline: Timeline) -> list[float]:
        """Per rank, the most that it keeps at once in a timeline of ``schedule``."""
        curves = (
            memory_over_time(timeline, self.memory, rank, schedule.moved)
            for rank in range(timeline.ranks)
        )
        return [max(size for _, size in curve) for curve in curves]
