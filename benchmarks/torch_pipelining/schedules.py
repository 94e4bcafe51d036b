"""torch's schedules."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule.

    Attributes:
        name: as ``get_schedule_class`` takes it.
        schedule: torch's class.
        chunks: stages on each rank.
        v_shaped: rank r holds stages r and 2P - 1 - r, rather than every P-th one.
        split: whether it has I and W.
    """

    name: str
    schedule: Any
    chunks: int = 2
    v_shaped: bool = False
    split: bool = False


ENTRIES = {
    each.name: each
    for each in (
        Entry("GPipe", ScheduleGPipe, 1),
        Entry("1F1B", Schedule1F1B, 1),
        Entry("Interleaved1F1B", ScheduleInterleaved1F1B),
        Entry("LoopedBFS", ScheduleLoopedBFS),
        Entry("InterleavedZeroBubble", ScheduleInterleavedZeroBubble, split=True),
        Entry("ZBVZeroBubble", ScheduleZBVZeroBubble, v_shaped=True, split=True),
        Entry("DualPipeV", ScheduleDualPipeV, v_shaped=True, split=True),
    )
}
