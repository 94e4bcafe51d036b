"""A pipeline schedule as data: the actions of each rank, in order. Each action has a reversible
text form.
"""

from __future__ import annotations

import enum
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from autosplit.errors import ScheduleError
from autosplit.text.figures import nearest


class ActionKind(enum.Enum):
    """The kind of an action; the value is its text."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    EVICT = "EVICT"
    ACCEPT = "ACCEPT"
    LOAD = "LOAD"
    RETURN = "RETURN"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    AWAIT = "AWAIT"
    RECOMPUTE = "RECOMPUTE"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"

    # Members are singletons. Enum would hash their names in Python at every lookup of an action.
    __hash__ = object.__hash__

    @property
    def is_compute(self) -> bool:
        """True for F, I, W, B and RECOMPUTE: the kinds that occupy a rank."""
        return self in _COMPUTE

    @property
    def is_memory(self) -> bool:
        """True for the kinds that move or recompute activations: EVICT, ACCEPT, LOAD and RETURN
        (between partner ranks), OFFLOAD and RELOAD (to and from the host), AWAIT (which waits for
        a departure), and RECOMPUTE.
        """
        return self in _MEMORY

    @property
    def is_move(self) -> bool:
        """True for memory kinds that run beside computation: all but AWAIT and RECOMPUTE."""
        return self in LANES

    @property
    def is_shared(self) -> bool:
        """True for moves between partner ranks. Each partner's row lists its own half."""
        return self in _SHARED

    @property
    def is_whole(self) -> bool:
        """True for REDUCE_GRAD, UNSHARD and RESHARD. They concern a whole stage; their microbatch
        is 0.
        """
        return self in _WHOLE

    @property
    def is_message(self) -> bool:
        """True for sends and receives."""
        return self in _MESSAGES

    @property
    def is_scheduled(self) -> bool:
        """True for all kinds that a ``Schedule`` lists, which are all except messages."""
        return self in _COMPUTE or self in _MEMORY or self in SHARDING


BACKWARDS = {
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
    ActionKind.BACKWARD: "backward",
}
"""The kinds that use a microbatch's activations, with the method of a stage that runs each."""
METHODS = {ActionKind.FORWARD: "forward", **BACKWARDS}
"""The kinds that a stage runs, in a microbatch's order, with the method that runs each."""
SPLIT_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
"""The kinds that a microbatch runs on a stage, in order, if its backward is split."""
LANES = {
    ActionKind.EVICT: "evictions",
    ActionKind.RETURN: "evictions",
    ActionKind.ACCEPT: "acceptances",
    ActionKind.LOAD: "acceptances",
    ActionKind.OFFLOAD: "offloads",
    ActionKind.RELOAD: "reloads",
}
"""The lane of each move. The moves of a lane run one after another."""
DEPARTURES = frozenset({ActionKind.EVICT, ActionKind.RETURN, ActionKind.OFFLOAD})
"""Moves that free memory of the rank."""
ARRIVALS = LANES.keys() - DEPARTURES
"""Moves that allocate memory on the rank."""
SHARDING = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})
"""Kinds that gather, free and reduce the parameters of a sharded stage."""
_SHARED = LANES.keys() - {ActionKind.OFFLOAD, ActionKind.RELOAD}
_COMPUTE = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
        ActionKind.BACKWARD,
        ActionKind.RECOMPUTE,
    }
)
_MEMORY = {*LANES, ActionKind.AWAIT, ActionKind.RECOMPUTE}
_WHOLE = SHARDING | {ActionKind.WAIT_REDUCE_GRAD}
_MESSAGES = frozenset({ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B})
_KINDS = {kind.value: kind for kind in ActionKind}
_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})([A-Z_]+)(0|[1-9][0-9]{0,8})?")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a row: ``kind`` on one microbatch of one stage.

    The text form is that of ``torch.distributed.pipelining``: stage, kind, microbatch, as in
    ``0F1``, ``2I0``, ``1W3``, ``0B2`` or ``1SEND_F0``. Memory actions have the same form, as in
    ``3OFFLOAD2``. Actions of a whole stage have no microbatch: ``2REDUCE_GRAD``.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        number = "" if self.kind.is_whole else self.microbatch
        return f"{self.stage}{self.kind.value}{number}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action for a text that ``str(action)`` returned.

        Raises:
            ScheduleError: the text does not name an action.
        """
        match = _TEXT.fullmatch(text)
        kind = None if match is None else _KINDS.get(match[2])
        if match is None or kind is None or kind.is_whole is not (match[3] is None):
            word = re.sub("[^A-Z_]", "", text.upper())
            raise ScheduleError(
                "expected an action such as '0F1' (stage, kind, microbatch), numbers of at most 9 "
                f"digits without leading zeros, got {reprlib.repr(text)}; known kinds: "
                + ", ".join(_KINDS)
                + ("" if word in _KINDS else nearest(word, _KINDS))
            )
        return cls(int(match[1]), kind, int(match[3] or 0))


LARGEST = 1_000_000
"""Most actions of a step. More take minutes and gigabytes to build and to check."""


def calls_of(row: Iterable[Action], stage: int) -> list[str]:
    """For each action of a row, the call of the stage, as ``BackwardGraphs.compile_calls`` expects
    it: the method's name for the stage's I, W and B, and ``"forward"`` for every other action.
    """
    return [BACKWARDS.get(a.kind, "forward") if a.stage == stage else "forward" for a in row]


def check_size(stages: int, microbatches: int, most: int = LARGEST) -> None:
    """Refuse a step that is too large, before it is built.

    Args:
        stages: the number of stages.
        microbatches: the number of microbatches.
        most: the largest number of actions.

    Raises:
        ScheduleError: F, I and W of all microbatches on all stages are more than ``most`` actions.
    """
    actions = 3 * stages * microbatches
    if actions > most:
        raise ScheduleError(
            f"{stages:,} stages and {microbatches:,} microbatches make a step of {actions:,} "
            f"actions, more than the limit of {most:,}: use fewer stages, or fewer and "
            "larger microbatches"
        )


def check_counts(**counts: int) -> None:
    """Refuse counts that are not integers of at least 1.

    Raises:
        ScheduleError: names the argument and its value.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(f"{name} must be an integer >= 1, got {value!r}")


@dataclass(frozen=True)
class Schedule:
    """The actions of one training step: computation and moves of activations, rank by rank.

    Attributes:
        name: the schedule's name, for messages and tables.
        stages: number of stages N.
        microbatches: number of microbatches M.
        ranks: per rank, its actions in the order in which it runs them: F, I, W and B; moves at the
            places where they start (see ``moves``); and maybe UNSHARD, RESHARD and REDUCE_GRAD (see
            ``gathers``). Sends and receives follow from these actions and from ``placement``.
        placement: ``placement[stage]`` is the rank that holds the stage.
        split_backward: False if every backward is a full backward (B).
        crosses_step: True if ranks do not wait for each other between steps: a rank that has
            finished starts the next step while others still run this step.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    placement: tuple[int, ...]
    split_backward: bool
    crosses_step: bool = False

    @cached_property
    def kinds(self) -> frozenset[ActionKind]:
        """The kinds of all actions."""
        return frozenset(action.kind for row in self.ranks for action in row)

    def partner(self, rank: int) -> int:
        """The rank that accepts the activations that ``rank`` evicts: the rank at the other end of
        the pipeline, as in BPipe.
        """
        return len(self.ranks) - 1 - rank

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)
