"""In which order a rank takes up its steps: as scheduled, or weight gradients in every wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import result_of

Values = list[Any]
"""Tensors, or None where there is no gradient; a weight half takes and gives nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """An action as fetch, compute and deliver, so that waiting for input is not counted as work.

    Attributes:
        action: what it is.
        fetch: waits for the action's input.
        compute: the work.
        deliver: hands on the result.
        arrived: whether ``fetch`` would return at once.
        calls: for several W that a stage may run together, the steps to run in place of this one:
            known only when it is their turn, by what their microbatches left.
    """

    action: Action
    fetch: Callable[[], Values]
    compute: Callable[[Values], Values]
    deliver: Callable[[Values], None]
    arrived: Callable[[], bool]
    calls: Callable[[], Sequence[Step]] | None = None


def drop(values: Values) -> None:
    """Delivery of a step whose results nobody takes."""


def at_once() -> bool:
    """Arrival of a step that waits for nothing."""
    return True


Order = Callable[[Sequence[Step]], Iterator[Step]]
"""Yields every step once; whoever asks for the next has run the one before."""


def as_scheduled(steps: Sequence[Step]) -> Iterator[Step]:
    """The order of the schedule."""
    return iter(steps)


def early_weights(steps: Sequence[Step]) -> Iterator[Step]:
    """The order of the schedule, but while a step's input is under way, run the next W's.

    W's and their slices keep their order among each other, so that gradients are added up in the
    same order, with the same rounding, however the messages fall; and none runs later than
    scheduled, so that no more is held than the schedule holds.
    """
    weights = deque(step for step in steps if _is_weight(step))
    done: set[Action] = set()
    for step in steps:
        if _is_weight(step):
            if weights and weights[0] is step:
                yield weights.popleft()
            continue
        while weights and not step.arrived() and _can_run(weights[0].action, done):
            yield weights.popleft()
        yield step
        done.add(result_of(step.action))


def _is_weight(step: Step) -> bool:
    return step.action.kind is ActionKind.BACKWARD_WEIGHT


def _can_run(weight: Action, done: set[Action]) -> bool:
    return Action(weight.stage, ActionKind.BACKWARD_INPUT, weight.microbatch) in done
