"""The reductions of gradients over replicas of a pipeline, beside a simulated step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from autosplit.errors import ScheduleError
from autosplit.mesh.buckets import CAP
from autosplit.pipeline.schedule.action import Action, ActionKind

from .timeline import Span
from .transfer import Link

_MAKERS = (ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD)


@dataclass(frozen=True)
class Reductions:
    """What replicas of a pipeline reduce at the end of each step.

    A rank has one link to its replicas, which carries a bucket after another. A stage's buckets
    are ready with its last W; of a W in slices, which its last Ws run the first of all of before
    the second, each slice's with it.

    Attributes:
        bytes: per stage, of its gradients.
        link: how long a reduction takes: ``latency`` and its bytes by ``bandwidth``.
        cap: bytes of a bucket.
        slices: into how many parts of W, and of its gradients, a stage is cut.

    Raises:
        ScheduleError: bytes, a cap or slices that cannot be.
    """

    bytes: Sequence[float]
    link: Link
    cap: float = CAP
    slices: int = 1

    def __post_init__(self) -> None:
        if not all(math.isfinite(size) and size >= 0.0 for size in self.bytes):
            raise ScheduleError(f"the bytes of gradients are 0 or more, got {[*self.bytes]}")
        if not self.cap > 0 or self.slices < 1:
            raise ScheduleError(
                f"a bucket has more than 0 bytes and W 1 slice or more, got {self.cap} bytes and "
                f"{self.slices} slices"
            )

    def spans(self, spans: Iterable[Span]) -> list[Span]:
        """The reductions of a step in which this was run, a span each.

        Raises:
            ScheduleError: a stage whose bytes are not known.
        """
        free: dict[int, float] = {}
        found = []
        ready = [each for rank, made in _made(spans).items() for each in self._ready(rank, made)]
        for at, rank, stage, size in sorted(ready, key=itemgetter(0, 1)):
            start = max(at, free.get(rank, 0.0))
            end = free[rank] = start + self.link.latency + size / self.link.bandwidth
            found.append(Span(rank, Action(stage, ActionKind.REDUCE_GRAD, 0), start, end))
        return found

    def _ready(
        self, rank: int, made: Mapping[int, Sequence[Span]]
    ) -> Iterator[tuple[float, int, int, float]]:
        """When a rank's buckets are ready: seconds, rank, stage, bytes."""
        for stage, parts in made.items():
            if stage >= len(self.bytes):
                raise ScheduleError(
                    f"stage {stage} is run, but the bytes of {len(self.bytes)} stages are given"
                )
            start, end = _last_stretch(parts)
            for number in range(1, self.slices + 1):
                at = start + (end - start) * number / self.slices
                left = self.bytes[stage] / self.slices
                while left > 0.0:
                    yield at, rank, stage, min(left, self.cap)
                    left -= self.cap


def last_weights_by_stage(
    rows: Sequence[Sequence[Action]], size: Sequence[float] | Mapping[int, float]
) -> tuple[tuple[Action, ...], ...]:
    """The rows of a schedule, in which the Ws at the end of each come stage by stage.

    A stage's reduction can start when its last W is done; that of the most bytes leaves first.
    Gradients are added up in the same order as before, and Ws only free what they need.

    Args:
        rows: per rank, its actions.
        size: per stage, the bytes of its gradients.
    """
    found = []
    for row in rows:
        cut = len(row)
        while cut and row[cut - 1].kind is ActionKind.BACKWARD_WEIGHT:
            cut -= 1
        late = sorted(row[cut:], key=lambda action: (-size[action.stage], action.stage))
        found.append((*row[:cut], *late))
    return tuple(found)


def _made(spans: Iterable[Span]) -> dict[int, dict[int, list[Span]]]:
    """By rank and stage what makes weight gradients, in order."""
    found: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in sorted(spans, key=lambda span: span.end):
        if span.action.kind in _MAKERS:
            found[span.rank][span.action.stage].append(span)
    return found


def _last_stretch(parts: Sequence[Span]) -> tuple[float, float]:
    """Start and end of the last Ws that follow each other without a gap; of a B only its end."""
    last = parts[-1]
    if last.action.kind is ActionKind.BACKWARD:
        return last.end, last.end
    start = last.start
    for span in reversed(parts[:-1]):
        if span.end < start - 1e-12 or span.action.kind is ActionKind.BACKWARD:
            break
        start = span.start
    return start, last.end
