"""Predicted peak of a rank: its row of the schedule played with storages instead of tensors.

What each call takes, makes and lets go of is in its graph; what messages hold, in the order of the
row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autosplit.passes import Kind, Role
from autosplit.passes.lowering.buffers import LiveBytes
from autosplit.pipeline.engine.boundaries import Negotiation
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import LevelByOrder, recomputed
from autosplit.pipeline.schedule.routes import result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.runtime.fitting import fitting, longest_needed_first
from autosplit.stage import Stage

from .call_memory import CallMemory
from .message_replay import Level, MessageReplay, Storage

_CALLS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
    ActionKind.BACKWARD: "backward",
    ActionKind.RECOMPUTE: "forward",
}
_AWAY = (ActionKind.EVICT, ActionKind.OFFLOAD)
_BACK = (ActionKind.LOAD, ActionKind.RELOAD)

Held = dict[Role, Storage]

Evicted = dict[str, list[int]]
"""``"STAGE MICROBATCH"`` -> bytes of each of its journeys to the partner, in order."""


class RankReplay:
    """Plays steps of one rank.

    What leaves and what comes counts as it may be there at most, whenever it does
    (``LevelByOrder``).

    Args:
        schedule: what is run.
        rank: whose part.
        feeds: who feeds whom.
        stages: this rank's stages.
        negotiation: where it was agreed on what stages put out and get back.
        calls: knows what stages' calls hold.
        posts: see ``Transport``.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        feeds: Feeds,
        stages: Mapping[int, Stage],
        negotiation: Negotiation,
        calls: CallMemory,
        posts: Mapping[Action, Sequence[int]],
    ) -> None:
        self._stages = stages
        self._calls = calls
        self._row = schedule.ranks[rank]
        self._again = recomputed(self._row)
        self._moved = schedule.moved
        self._level = Level()
        self._messages = MessageReplay(schedule, rank, feeds, negotiation, self._level, posts)
        self._saved: dict[tuple[int, int], Held] = {}
        self._deferred: dict[tuple[int, int], Held] = {}
        self._inputs: dict[tuple[int, int], Held] = {}
        self._away: dict[tuple[int, int], list[Storage]] = {}
        self._summed: dict[int, set[str]] = defaultdict(set)  # per stage, parameters
        self.evicted: Evicted = {}

    def peak(self, guests: Evicted) -> int:
        """The most bytes that the rank holds at any time of a step beside its fixed ones and the
        batch; afterwards ``evicted`` says what it sends its partner.

        Args:
            guests: what every rank evicts; the partner's is what comes here.
        """
        return max((level for _, level in self.levels(guests)), default=0)

    def levels(self, guests: Evicted) -> list[tuple[Action, int]]:
        """As ``peak``, for each action of the row: the most from the end of the one before it."""
        self._summed.clear()
        self.evicted = {}
        visits = {name: [*sizes] for name, sizes in guests.items()}
        staying: dict[str, int] = {}
        found: list[tuple[Action, int]] = []
        # Beside what stays here, of which what leaves is part till then.
        moving = LevelByOrder(self._row)
        self._level.begin()
        self._messages.begin()
        for action in self._row:
            name = f"{action.stage} {action.microbatch}"
            before = self._level.now + int(moving.most)
            size = 0
            if action.kind in _AWAY:
                size = self._send_away(action)
            elif action.kind in _BACK:
                size = self._bring_back(action)
            elif action.kind is ActionKind.ACCEPT:
                size = staying[name] = visits[name].pop(0) if visits.get(name) else 0
            elif action.kind is ActionKind.RETURN:
                size = staying.pop(name)
            moving.begin(action, size)
            if action.kind.is_compute:
                self._compute(action)
            found.append((action, max(before, self._level.highest + int(moving.most))))
            self._level.begin()
        self._messages.finish()
        return found

    def _compute(self, action: Action) -> None:
        self._messages.post(action)
        if action.kind is ActionKind.FORWARD:
            self._forward(action)
        elif action.kind is ActionKind.RECOMPUTE:
            self._recompute(action)
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            self._weight(action)
        else:
            self._backward(action)

    def _send_away(self, action: Action) -> int:
        """What a microbatch holds alone, as far as it may leave: how much that is."""
        key = action.stage, action.microbatch
        limit = self._moved.get(action.stage)
        held = self._saved[key] if key in self._saved else self._deferred[key]
        names = {each: [role.name for role in roles] for roles, each in _alone(held)}
        gone = longest_needed_first(names, self._stages[action.stage].functions.last_uses)
        if limit is not None:
            gone = [gone[place] for place in fitting([each.bytes for each in gone], limit)]
        for storage in gone:
            storage.own = False  # counted as leaving
        total = sum(storage.bytes for storage in gone)
        self._away[key] = gone
        if action.kind is ActionKind.EVICT:
            self.evicted.setdefault(f"{key[0]} {key[1]}", []).append(total)
        return total

    def _bring_back(self, action: Action) -> int:
        """The same is on its way back: how much."""
        back = self._away.pop((action.stage, action.microbatch))
        for storage in back:
            storage.own = True  # counted as arriving from here on, and gone when nobody holds it
        return sum(storage.bytes for storage in back)

    def _forward(self, action: Action) -> None:
        functions = self._stages[action.stage].functions
        given = self._messages.inputs(action)
        names = functions.capture.inputs  # behind these are the targets, of the batch
        pairs = zip(names, given, strict=False)
        taken = {Role(Kind.INPUT, name): s for name, s in pairs if s}
        key = action.stage, action.microbatch
        if key in self._again:
            self._level.hold(taken.values())
            self._inputs[key] = taken
        made = self._call(action, taken)
        saved = {role: s for role, s in made.items() if role.kind is Kind.SAVED}
        if key in self._again:
            self._level.release(saved.values())
        else:
            self._saved[key] = saved
        outputs = [made.pop(Role(Kind.OUTPUT, name), None) for name in functions.capture.outputs]
        self._messages.deliver(result_of(action), outputs)
        # New values of buffers are written into these.
        self._level.release(s for role, s in made.items() if role.kind is not Kind.SAVED)

    def _recompute(self, action: Action) -> None:
        """F again, of which what it saves is kept."""
        key = action.stage, action.microbatch
        made = self._call(action, self._inputs.pop(key))
        self._saved[key] = {role: s for role, s in made.items() if role.kind is Kind.SAVED}
        self._level.release(s for role, s in made.items() if role.kind is not Kind.SAVED)

    def _backward(self, action: Action) -> None:
        functions = self._stages[action.stage].functions
        if functions.graphs.backward is None:
            self._pass_over(action)
            return
        taken = self._saved.pop((action.stage, action.microbatch))
        pairs = zip(functions.capture.outputs, self._messages.gradients(action), strict=False)
        for name, storage in pairs:
            spec = functions.tangent_specs.get(name)
            if spec is None:
                self._level.release([storage])
                continue
            if storage is None:  # I runs on zeros
                storage = Storage(spec.shape.numel() * spec.dtype.itemsize)
                self._level.hold([storage])
            taken[Role(Kind.TANGENT, name)] = storage
        made = self._call(action, taken)
        names = functions.capture.inputs
        inputs = [made.pop(Role(Kind.INPUT_GRAD, name), None) for name in names]
        if action.kind is ActionKind.BACKWARD_INPUT:
            self._deferred[action.stage, action.microbatch] = made
        self._messages.deliver(result_of(action), inputs)

    def _pass_over(self, action: Action) -> None:
        """The backward of a stage with nothing to differentiate."""
        self._saved.pop((action.stage, action.microbatch), None)
        self._level.release(self._messages.gradients(action))
        if action.kind is ActionKind.BACKWARD_INPUT:
            self._deferred[action.stage, action.microbatch] = {}
        count = len(self._stages[action.stage].functions.capture.inputs)
        self._messages.deliver(result_of(action), [None] * count)

    def _weight(self, action: Action) -> None:
        if self._stages[action.stage].functions.graphs.backward is None:
            return
        taken = self._deferred.pop((action.stage, action.microbatch))
        self._level.release(self._call(action, taken).values())

    def _call(self, action: Action, taken: Held) -> Held:
        """One call: the most that is alive in it, then what it made instead of what it took.

        Gradients that it makes are fixed from here on, see ``Band``.
        """
        call = _CALLS[action.kind]
        live = self._calls.of(self._stages[action.stage], call, adds=self._adds(action.stage, call))
        taken = self._named(action, taken, live)
        dying = [(roles, storage.bytes) for roles, storage in _alone(taken)]
        self._level.note(live.peak(dying) - _gradients(live))
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

    def _named(self, action: Action, taken: Held, live: LiveBytes) -> Held:
        """What a call takes under the names of its graph. Where I passes on what it takes, B runs
        the graph of W.
        """
        if action.kind is not ActionKind.BACKWARD or live.takes.issuperset(taken):
            return taken
        passed = self._calls.of(self._stages[action.stage], "backward_input").results
        names = {each.memory: each.role for each in passed}
        return {names.get(role, role): storage for role, storage in taken.items()}

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


def _alone(taken: Held) -> list[tuple[set[Role], Storage]]:
    """Storages that nobody holds but whoever has these, with what lies in each."""
    groups: dict[Storage, set[Role]] = defaultdict(set)
    for role, storage in taken.items():
        groups[storage].add(role)
    return [
        (roles, storage)
        for storage, roles in groups.items()
        if storage.own and storage.holders == len(roles)
    ]


def _gradients(live: LiveBytes) -> int:
    """Bytes of the gradients that a call makes anew."""
    made = [each for each in live.results if each.role.kind is Kind.PARAMETER_GRAD]
    sizes = {each.memory: each.bytes for each in made if isinstance(each.memory, int)}
    return sum(sizes.values())
