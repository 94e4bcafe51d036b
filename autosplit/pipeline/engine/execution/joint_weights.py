"""W of several microbatches as one call, where a rank runs them next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol, runtime_checkable

from autosplit.pipeline.schedule.action import Action, ActionKind, JoinedWeights

from .action_order import Step, Values, at_once, drop


@runtime_checkable
class JoiningStage(Protocol):
    """A stage that may run W of several microbatches in one call."""

    @property
    def joins_weights(self) -> bool:
        """Whether it ever does."""
        ...

    def weight_calls(self, microbatches: Sequence[int]) -> list[list[int]]:
        """Which of these W, in this order, go together: the microbatches of each call."""
        ...

    def backward_weight(self, microbatch: int | Sequence[int]) -> None:
        """Add the weight gradients of one microbatch, or of several in the order given."""
        ...


def join_adjacent_weights(row: Iterable[Action], stages: Mapping[int, object]) -> Iterator[Action]:
    """A rank's actions, with W of one stage next to each other as one action where the stage can
    run them together.

    Where a rank holds several stages, Ws of others may stand in between: in a stretch of Ws nothing
    waits for any of them, so a stage's later ones move up to its first.

    Args:
        row: the actions in order.
        stages: the rank's stages by index.
    """
    joining = {
        index
        for index, stage in stages.items()
        if isinstance(stage, JoiningStage) and stage.joins_weights
    }

    for are_weights, actions in groupby(row, _is_weight):
        if not (are_weights and joining):
            yield from actions
            continue
        groups: dict[Action | int, list[Action]] = {}
        for action in actions:
            key = action.stage if action.stage in joining else action
            groups.setdefault(key, []).append(action)
        yield from map(JoinedWeights.of, groups.values())


def joined_step(
    action: JoinedWeights, stage: JoiningStage, finish: Callable[[Values], None]
) -> Step:
    """The step of some W next to each other.

    Its calls are known only when it is their turn: microbatches whose forwards ran different
    graphs, because the module changed in between, do not go together.

    Args:
        action: these W.
        stage: theirs.
        finish: is called behind the last of them.
    """

    def calls() -> list[Step]:
        groups = stage.weight_calls(action.microbatches)
        steps = []
        for group in groups:
            weights = [Action(action.stage, action.kind, each) for each in group]
            deliver = finish if group is groups[-1] else drop
            compute = partial(_run, stage, group)
            steps.append(Step(JoinedWeights.of(weights), list, compute, deliver, at_once))
        return steps

    return Step(action, list, _as_it_is, drop, at_once, calls)


def _is_weight(action: Action) -> bool:
    return action.kind is ActionKind.BACKWARD_WEIGHT


def _run(stage: JoiningStage, microbatches: Sequence[int], values: Values) -> Values:
    stage.backward_weight(microbatches)
    return values


def _as_it_is(values: Values) -> Values:
    return values
