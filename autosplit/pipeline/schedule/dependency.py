"""What an action needs before it can start, and what it makes.

Both are named by actions. A full backward B makes the same gradient for the previous stage as I
does, so its result goes by the name of I.
"""

from __future__ import annotations

from .action import Action, ActionKind


def result_of(action: Action) -> Action:
    """The name of what ``action`` makes: the action itself, or I for a B."""
    if action.kind is ActionKind.BACKWARD:
        return Action(action.stage, ActionKind.BACKWARD_INPUT, action.microbatch)
    return action


def needs_of(action: Action, stages: int) -> tuple[Action, ...]:
    """The results that must exist before ``action`` starts, in a pipeline of ``stages`` stages.

    F needs the previous stage's output, I and B need their own F and the next stage's input
    gradient, W needs its own I, and the I of each of its microbatches where it is of several.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        return () if stage == 0 else (Action(stage - 1, ActionKind.FORWARD, microbatch),)
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return tuple(Action(stage, ActionKind.BACKWARD_INPUT, m) for m in action.microbatches)
    if action.kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD):
        own = Action(stage, ActionKind.FORWARD, microbatch)
        if stage == stages - 1:
            return (own,)
        return (own, Action(stage + 1, ActionKind.BACKWARD_INPUT, microbatch))
    return ()
