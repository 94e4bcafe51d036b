"""The reductions of gradients over replicas of a pipeline, beside a simulated step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

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

    def placed(self, rows: Sequence[Sequence[Action]], seconds: Callable[[Action], float]) -> Rows:
        """As ``last_weights_by_stage``, in the order after which a rank's last reduction ends
        soonest: Ws, then their reduction, are a flow shop of two machines (Johnson 1954).

        Args:
            rows: per rank, its actions.
            seconds: of an action.
        """

        def rank_of(stage: int, late: Sequence[Action]) -> tuple[bool, float]:
            works, sends = sum(map(seconds, late)), self.bytes[stage] / self.link.bandwidth
            return (False, works) if works < sends else (True, -sends)

        return _regrouped(rows, rank_of)

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
) -> Rows:
    """The rows of a schedule, in which the Ws at the end of each come stage by stage.

    A stage's reduction can start when its last W is done; that of the most bytes leaves first, of
    equal ones that of the fewest Ws. Gradients are added up in the same order as before, and Ws
    only free what they need.

    Args:
        rows: per rank, its actions.
        size: per stage, the bytes of its gradients.
    """
    return _regrouped(rows, lambda stage, late: (-size[stage], len(late), -stage))


def _regrouped(
    rows: Sequence[Sequence[Action]], rank_of: Callable[[int, Sequence[Action]], Any]
) -> Rows:
    """The last Ws of each row by stage, in the order of what is said of a stage and its Ws."""
    found = []
    for row in rows:
        cut = len(row)
        while cut and row[cut - 1].kind is ActionKind.BACKWARD_WEIGHT:
            cut -= 1
        by_stage: dict[int, list[Action]] = defaultdict(list)
        for action in row[cut:]:
            by_stage[action.stage].append(action)
        order = sorted(by_stage, key=lambda stage: rank_of(stage, by_stage[stage]))
        found.append((*row[:cut], *(action for stage in order for action in by_stage[stage])))
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
