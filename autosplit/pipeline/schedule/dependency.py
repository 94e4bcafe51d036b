"""The dependency model: what an action needs before it can start, and what it makes.

Both are named by actions. A full backward B makes the same gradient for the previous stage as I
does, so its result goes by the name of I. Which stages feed which is for ``Feeds`` to say.
"""

from __future__ import annotations

from .action import Action, ActionKind
from .wiring import Feeds


def result_of(action: Action) -> Action:
    """The name of what ``action`` makes: the action itself, or I for a B."""
    if action.kind is ActionKind.BACKWARD:
        return Action(action.stage, ActionKind.BACKWARD_INPUT, action.microbatch)
    return action


def needs_of(action: Action, feeds: Feeds) -> tuple[Action, ...]:
    """The results that must exist before ``action`` starts: its own stage's first.

    F needs the outputs of the stages before it, I and B need their own F and the input gradients
    of the stages behind it, W needs the I of each of its microbatches, RECOMPUTE its own F. What
    moves need of each other is in ``moves``.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.FORWARD:
        return tuple([Action(source, kind, microbatch) for source in feeds.sources(stage)])
    if kind is ActionKind.BACKWARD_WEIGHT:
        inputs = ActionKind.BACKWARD_INPUT
        return tuple([Action(stage, inputs, m) for m in action.microbatches])
    if kind is ActionKind.BACKWARD_INPUT or kind is ActionKind.BACKWARD:
        inputs = ActionKind.BACKWARD_INPUT
        behind = [Action(target, inputs, microbatch) for target in feeds.targets(stage)]
        return (Action(stage, ActionKind.FORWARD, microbatch), *behind)
    if kind is ActionKind.RECOMPUTE:
        return (Action(stage, ActionKind.FORWARD, microbatch),)
    return ()
