"""Predicted peak of a rank: its row of the schedule played with storages instead of tensors.

What each call takes, makes and lets go of is in its graph; what messages hold, in the order of the
row. What a kernel takes for itself and gives back is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from autosplit.passes import Kind, Role
from autosplit.passes.lowering.concatenate_microbatches import microbatch_role
from autosplit.passes.lowering.live_bytes import LiveBytes
from autosplit.pipeline.engine.execution.joint_weights import join_adjacent_weights
from autosplit.pipeline.engine.messages.shape_negotiation import TensorMeta
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.stage import Stage

from .message_replay import MessageReplay
from .storages import Level, Storage

_CALLS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
    ActionKind.BACKWARD: "backward",
}

Held = dict[Role, Storage]


def predicted_peak(
    schedule: Schedule,
    rank: int,
    feeds: Feeds,
    stages: Mapping[int, Stage],
    boundaries: Callable[[int], Sequence[TensorMeta]],
) -> int:
    """The most bytes that a rank holds at any time of a step beside its fixed ones and the batch.

    Args:
        schedule: what is run.
        rank: whose peak.
        feeds: who feeds whom.
        stages: this rank's stages.
        boundaries: gives what a stage puts out, of this rank's stages and those that it hears of.
    """
    replay = _RankReplay(schedule, rank, feeds, stages, boundaries)
    replay.step()  # buffers of messages are made
    return replay.step()


class _RankReplay:
    """Plays steps of one rank; arguments are those of ``predicted_peak``."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        feeds: Feeds,
        stages: Mapping[int, Stage],
        boundaries: Callable[[int], Sequence[TensorMeta]],
    ) -> None:
        self._stages = stages
        self._row = [*join_adjacent_weights(schedule.ranks[rank], stages)]
        self._level = Level()
        self._messages = MessageReplay(schedule, rank, feeds, boundaries, self._level)
        self._live = cache(self._live_bytes)
        self._saved: dict[tuple[int, int], Held] = {}
        self._deferred: dict[tuple[int, int], Held] = {}
        self._summed: dict[int, set[str]] = defaultdict(set)  # per stage, parameters

    def step(self) -> int:
        """One step; the most bytes in it."""
        self._summed.clear()
        self._level.begin()
        self._messages.begin()
        for action in self._row:
            if action.kind is ActionKind.FORWARD:
                self._forward(action)
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                self._weight(action)
            elif action.kind in _CALLS:
                self._backward(action)
        self._messages.finish()
        return self._level.highest

    def _forward(self, action: Action) -> None:
        functions = self._stages[action.stage].functions
        given = self._messages.inputs(action)
        names = functions.capture.inputs  # behind these are the targets, of the batch
        pairs = zip(names, given, strict=False)
        made = self._call(action, {Role(Kind.INPUT, name): s for name, s in pairs if s})
        saved = {role: s for role, s in made.items() if role.kind is Kind.SAVED}
        self._saved[action.stage, action.microbatch] = saved
        outputs = [made.pop(Role(Kind.OUTPUT, name), None) for name in functions.capture.outputs]
        self._messages.deliver(result_of(action), outputs)
        # New values of buffers are written into these.
        self._level.release(s for role, s in made.items() if role.kind is not Kind.SAVED)

    def _backward(self, action: Action) -> None:
        functions = self._stages[action.stage].functions
        taken = self._saved.pop((action.stage, action.microbatch))
        pairs = zip(functions.capture.outputs, self._messages.gradients(action), strict=False)
        for name, storage in pairs:
            if storage and name in functions.tangent_specs:
                taken[Role(Kind.TANGENT, name)] = storage
            elif storage:
                self._level.release([storage])
        made = self._call(action, taken)
        names = functions.capture.inputs
        inputs = [made.pop(Role(Kind.INPUT_GRAD, name), None) for name in names]
        if action.kind is ActionKind.BACKWARD_INPUT:
            self._deferred[action.stage, action.microbatch] = made
        self._messages.deliver(result_of(action), inputs)

    def _weight(self, action: Action) -> None:
        taken: Held = {}
        for place, microbatch in enumerate(action.microbatches):
            deferred = self._deferred.pop((action.stage, microbatch))
            if len(action.microbatches) > 1:
                deferred = {microbatch_role(r, place): s for r, s in deferred.items()}
            taken |= deferred
        self._level.release(self._call(action, taken).values())

    def _call(self, action: Action, taken: Held) -> Held:
        """One call: the most that is alive in it, then what it made instead of what it took.

        Gradients that it makes are fixed from here on, see ``Band``.
        """
        call = _CALLS[action.kind]
        adds = self._adds(action.stage, call)
        live = self._live(action.stage, call, len(action.microbatches), adds)
        self._level.note(live.peak(_dying(taken)) - _gradients(live))
        made: Held = {}
        storages: dict[int, Storage] = {}
        for result in live.results:
            if result.role.kind is Kind.PARAMETER_GRAD:
                continue
            if isinstance(result.memory, int):
                own = storages.setdefault(result.memory, Storage(result.bytes))
                made[result.role] = own
            elif result.memory in taken:
                made[result.role] = taken[result.memory]
        self._level.swap(taken.values(), made.values())
        return made

    def _adds(self, stage: int, call: str) -> bool:
        """Whether there are sums of all gradients of a call; there are behind it."""
        functions, summed = self._stages[stage].functions, self._summed[stage]
        names = {
            "backward_input": functions.early_parameters,
            "backward_weight": functions.late_parameters,
            "backward": functions.parameter_names,
        }.get(call, ())
        adds = bool(names) and summed.issuperset(names)
        summed.update(names)
        return adds

    def _live_bytes(self, stage: int, call: str, count: int, adds: bool) -> LiveBytes:
        return self._stages[stage].live_bytes(call, microbatches=count, adds=adds)


def _dying(taken: Held) -> list[tuple[set[Role], int]]:
    """What nobody holds but the call that takes it: inputs of one storage, and its bytes."""
    groups: dict[Storage, set[Role]] = defaultdict(set)
    for role, storage in taken.items():
        groups[storage].add(role)
    return [
        (roles, storage.bytes)
        for storage, roles in groups.items()
        if storage.own and storage.holders == len(roles)
    ]


def _gradients(live: LiveBytes) -> int:
    """Bytes of the gradients that a call makes anew."""
    made = [each for each in live.results if each.role.kind is Kind.PARAMETER_GRAD]
    sizes = {each.memory: each.bytes for each in made if isinstance(each.memory, int)}
    return sum(sizes.values())
