"""In which order a rank takes up its steps: as scheduled, or weight gradients in every wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
        adds: of its stage's weight gradients the slices that it adds to.
        calls: for several W that a stage may run together, the steps to run in place of this one:
            known only when it is their turn, by what their microbatches left.
    """

    action: Action
    fetch: Callable[[], Values]
    compute: Callable[[Values], Values]
    deliver: Callable[[Values], None]
    arrived: Callable[[], bool]
    calls: Callable[[], Sequence[Step]] | None = None
    adds: tuple[int, ...] = ()


def drop(values: Values) -> None:
    """Delivery of a step whose results nobody takes."""


def at_once() -> bool:
    """Arrival of a step that waits for nothing."""
    return True


def behind(
    step: Step, needs: Sequence[Callable[[], None]], arrived: Sequence[Callable[[], bool]]
) -> Step:
    """The step, behind calls that wait for what it needs; ``arrived`` say whether they would."""
    fetch, calls = step.fetch, step.calls

    def wait() -> None:
        for need in needs:
            need()

    def fetch_behind() -> Values:
        wait()
        return fetch()

    def calls_behind() -> Sequence[Step]:
        wait()
        return () if calls is None else calls()

    return replace(
        step,
        fetch=fetch_behind if calls is None else fetch,
        arrived=lambda: step.arrived() and all(each() for each in arrived),
        calls=None if calls is None else calls_behind,
    )


Order = Callable[[Sequence[Step]], Iterator[Step]]
"""Yields every step once; whoever asks for the next has run the one before."""


def as_scheduled(steps: Sequence[Step]) -> Iterator[Step]:
    """The order of the schedule."""
    return iter(steps)


def early_weights(steps: Sequence[Step]) -> Iterator[Step]:
    """The order of the schedule, but while a step's input is under way, run the next W's.

    W's and their slices keep their order among each other, so that gradients are added up in the
    same order, with the same rounding, however the messages fall; and none runs later than
    scheduled, so that no more is held than the schedule holds. What is away comes back where the
    schedule has it come.
    """
    weights = deque(step for step in steps if _is_weight(step))
    done: set[Action] = set()

    def can_run(weight: Step) -> bool:
        action = weight.action
        ran = Action(action.stage, ActionKind.BACKWARD_INPUT, action.microbatch) in done
        return ran and weight.arrived()

    for step in steps:
        if _is_weight(step):
            if weights and weights[0] is step:
                yield weights.popleft()
            continue
        while weights and not step.arrived() and can_run(weights[0]):
            yield weights.popleft()
        yield step
        done.add(result_of(step.action))


def slices_together(steps: Sequence[Step]) -> list[Step]:
    """The same steps, but of each stage's last Ws that stand next to each other, the first slice of
    all before the second: its gradients are complete, and may be reduced, while others are made.

    Each slice's gradients are added up in the same order as before.
    """
    row = list(steps)
    ends: dict[int, int] = {}
    for place, step in enumerate(row):
        if step.adds:
            ends[step.action.stage] = place
    for stage, end in ends.items():
        start = end
        while start >= 0 and _is_weight(row[start]) and row[start].action.stage == stage:
            start -= 1
        row[start + 1 : end + 1] = sorted(row[start + 1 : end + 1], key=lambda step: step.adds)
    return row


def _is_weight(step: Step) -> bool:
    return step.action.kind is ActionKind.BACKWARD_WEIGHT
