"""The reductions of gradients over replicas of a pipeline, beside a simulated step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.mesh.reduction import CAP
from autosplit.pipeline.schedule.action import Action, ActionKind

from .timeline import Span

Rows: TypeAlias = tuple[tuple[Action, ...], ...]
"""Per rank, its actions in order."""

_MAKERS = (ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD)


@dataclass(frozen=True)
class Reductions:
    """What replicas of a pipeline reduce at the end of each step.

    A rank has one link to its replicas, which carries a bucket after another. A stage's buckets
    are ready with its last W.

    Attributes:
        bytes: per stage, of its gradients.
        link: how long a reduction takes: ``latency`` and its bytes by ``bandwidth``.
        cap: bytes of a bucket.

    Raises:
        ScheduleError: bytes or a cap that cannot be.
    """

    bytes: Sequence[float]
    link: Link
    cap: float = CAP

    def __post_init__(self) -> None:
        if not all(math.isfinite(size) and size >= 0.0 for size in self.bytes):
            raise ScheduleError(f"the bytes of gradients are 0 or more, got {[*self.bytes]}")
        if not self.cap > 0:
            raise ScheduleError(f"a bucket has more than 0 bytes, got {self.cap}")

    def spans(self, spans: Iterable[Span]) -> list[Span]:
        """The reductions of a step in which this was run, a span each.

        Raises:
            ScheduleError: a stage whose bytes are not known.
        """
        free: dict[int, float] = {}
        found = []
        ready = [bucket for last in _last(spans) for bucket in self._ready(last)]
        for at, rank, stage, size in sorted(ready, key=itemgetter(0, 1)):
            start = max(at, free.get(rank, 0.0))
            end = free[rank] = start + self.link.latency + size / self.link.bandwidth
            found.append(Span(rank, Action(stage, ActionKind.REDUCE_GRAD, 0), start, end))
        return found

    def _ready(self, last: Span) -> Iterator[tuple[float, int, int, float]]:
        """When the buckets behind a stage's last W are ready: seconds, rank, stage, bytes."""
        stage = last.action.stage
        if stage >= len(self.bytes):
            raise ScheduleError(
                f"stage {stage} is run, but the bytes of {len(self.bytes)} stages are given"
            )
        left = self.bytes[stage]
        while left > 0.0:
            yield last.end, last.rank, stage, min(left, self.cap)
            left -= self.cap


def last_weights_by_stage(
    rows: Sequence[Sequence[Action]], size: Sequence[float] | Mapping[int, float]
) -> Rows:
    """The rows of a schedule, in which the Ws at the end of each come stage by stage.

    A stage's reduction can start when its last W is done; that of the most bytes leaves first, of
    equal ones that of the fewest Ws. Gradients are added up in the same order as before, and Ws
    only free what they need.

    Args:
        rows: per rank, its actions.
        size: per stage, the bytes of its gradients.
    """
    found = []
    for row in rows:
        cut = len(row)
        while cut and row[cut - 1].kind is ActionKind.BACKWARD_WEIGHT:
            cut -= 1
        by_stage: dict[int, list[Action]] = defaultdict(list)
        for action in row[cut:]:
            by_stage[action.stage].append(action)
        order = sorted(by_stage, key=lambda stage: (-size[stage], len(by_stage[stage]), -stage))
        found.append((*row[:cut], *(action for stage in order for action in by_stage[stage])))
    return tuple(found)


def _last(spans: Iterable[Span]) -> Iterable[Span]:
    """Of every rank and stage what makes weight gradients last."""
    made = (span for span in spans if span.action.kind in _MAKERS)
    ordered = sorted(made, key=lambda span: span.end)
    return {(span.rank, span.action.stage): span for span in ordered}.values()
