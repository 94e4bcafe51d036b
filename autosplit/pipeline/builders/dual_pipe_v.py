"""DualPipeV: microbatches enter a V of stages, and a rank runs one stage on the way down and one on
the way up.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) and the eight phases of its published
implementation (github.com/deepseek-ai/DualPipe), cut in half. A rank that meets a forward of one
direction and a backward of the other in the same phase may overlap them; here the forward comes
first.
"""

from __future__ import annotations

import itertools
from collections import deque

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Action, ActionKind

from .placement import Row, ScheduleTemplate, backward, forward


def dual_pipe_v(ranks: int, microbatches: int) -> ScheduleTemplate:
    """DualPipe cut in half: rank r of P holds the stages r and 2P-1-r of one copy.

    Bubble for like stages with an I no longer than an F, and M >= 2P: each rank idles
    (P-1)(F+I-W), where F, I and W are those of one stage.

    Activation memory of every rank: at most 2P + 1 pairs of a stage and a microbatch.

    Raises:
        ScheduleError: fewer than 2P microbatches.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"'dualpipe-v' needs at least 2P microbatches: expected {2 * ranks} or more for "
            f"{ranks} ranks, got {microbatches}"
        )

    rows = tuple(_phases(rank, ranks, microbatches) for rank in range(ranks))
    return ScheduleTemplate(rows, (*range(ranks), *reversed(range(ranks))))


def _phases(near: int, ranks: int, count: int) -> Row:
    """The eight phases of the rank that is ``near`` steps into the V, of ``ranks``.

    Stage 0 of its two is the one on the way down, which it meets in the first half of the way.
    """
    rank = _RowWriter((near, 2 * ranks - 1 - near))
    behind = ranks - 1 - near
    for _ in range(2 * behind):
        rank.forward(0)
    for _ in range(near + 1):
        rank.forward(0)
        rank.forward(1)
    for _ in range(behind):
        rank.inputs(1)
        rank.weight()
        rank.forward(1)
    for _ in range(count - 2 * ranks + near + 1):
        rank.forward(0)
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    for _ in range(behind):
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    # From the middle of the next phase on, Ws are kept for the waits of the last two.
    order = [which for _ in range(near + 1) for which in (1, 0)] + [0] * behind
    whole = near + 1
    for place, which in enumerate(order):
        if place >= 2 * (near + 1):
            rank.weight()
        (rank.backward if place < whole else rank.inputs)(which)
    while rank.pending:
        rank.weight()
    return tuple(rank.row)


class _RowWriter:
    """A row being written: the next passes of both stages, and the Ws that wait."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self._forwards, self._backwards = (
            [zip(itertools.repeat(stage), itertools.count(), strict=False) for stage in stages]
            for _ in range(2)
        )
        self.pending: deque[Action] = deque()
        self.row: list[Action] = []

    def forward(self, which: int) -> None:
        self.row.append(forward(*next(self._forwards[which])))

    def backward(self, which: int) -> None:
        self.row.append(backward(*next(self._backwards[which])))

    def inputs(self, which: int) -> None:
        """The next backward as an I, whose W waits."""
        stage, microbatch = next(self._backwards[which])
        self.row.append(Action(stage, ActionKind.BACKWARD_INPUT, microbatch))
        self.pending.append(Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch))

    def weight(self) -> None:
        """The oldest W that waits, if any does."""
        if self.pending:
            self.row.append(self.pending.popleft())
