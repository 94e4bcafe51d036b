"""What runs beside what: schedules of ours and of torch.distributed.pipelining's."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

IN_FLIGHT = "in flight: "


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to run a step.

    Attributes:
        name: as in the table.
        ours: by autosplit, or by torch.
        schedule: its name with autosplit, or the class with torch.
        chunks: stages on each rank.
        v_shaped: rank r holds stages r and 2P - 1 - r, rather than every P-th one.
        split_backward: whether I and W are separate actions.
        match: of one by torch, the name of the same schedule by autosplit.
        compiled: whether it also runs compiled, which takes a while to build.
        in_flight: whether steps follow each other, optimizer included, without all ranks meeting.
    """

    name: str
    ours: bool
    schedule: Any
    chunks: int = 1
    v_shaped: bool = False
    split_backward: bool = True
    match: str = ""
    compiled: bool = True
    in_flight: bool = False


def _flying(contender: Contender) -> Contender:
    match = contender.match and IN_FLIGHT + contender.match
    name = IN_FLIGHT + contender.name
    return dataclasses.replace(contender, name=name, match=match, in_flight=True)


_1F1B = Contender("1f1b", True, "1f1b")
_MANY = Contender("interleaved, 4 stages a rank", True, "interleaved", 4)
_ZB_V = Contender("zb-v", True, "zb-v", 2, v_shaped=True)
_DUAL = Contender("dualpipe-v", True, "dualpipe-v", 2, v_shaped=True)
OURS = (
    Contender("1f1b, fused", True, "1f1b", split_backward=False),
    _1F1B,
    Contender("gpipe, fused", True, "gpipe", split_backward=False),
    Contender("interleaved, fused", True, "interleaved", 2, split_backward=False),
    Contender("interleaved", True, "interleaved", 2),
    _MANY,
    _ZB_V,
    _DUAL,
    Contender("auto, 4 stages a rank", True, "auto", 4, compiled=False),
    *map(_flying, (_1F1B, _ZB_V, _DUAL)),
)
_THEIR_1F1B = Contender("1F1B", False, Schedule1F1B, split_backward=False, match="1f1b, fused")
_THEIR_ZBV = Contender(
    "ZBVZeroBubble", False, ScheduleZBVZeroBubble, 2, v_shaped=True, match="zb-v"
)
_THEIR_DUAL = Contender("DualPipeV", False, ScheduleDualPipeV, 2, v_shaped=True, match="dualpipe-v")
_THEIR_INTERLEAVED = Contender(
    "InterleavedZeroBubble", False, ScheduleInterleavedZeroBubble, 2, match="interleaved"
)
THEIRS = (
    _THEIR_1F1B,
    Contender("GPipe", False, ScheduleGPipe, split_backward=False, match="gpipe, fused"),
    Contender(
        "Interleaved1F1B",
        False,
        ScheduleInterleaved1F1B,
        2,
        split_backward=False,
        match="interleaved, fused",
    ),
    _THEIR_INTERLEAVED,
    dataclasses.replace(
        _THEIR_INTERLEAVED,
        name="InterleavedZeroBubble, 4 stages a rank",
        chunks=4,
        match="interleaved, 4 stages a rank",
        compiled=False,
    ),
    _THEIR_ZBV,
    _THEIR_DUAL,
    *map(_flying, (_THEIR_1F1B, _THEIR_ZBV, _THEIR_DUAL)),
)
