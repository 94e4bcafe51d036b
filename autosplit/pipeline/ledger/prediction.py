"""Predict the memory peak of a rank: its microbatches, the workspace of its calls, and its
messages.

The graph of a call shows its inputs, its results and the tensors that it frees. So one microbatch
runs through the stage's calls, with byte counts instead of tensors. The result is a
``StageMemory``, from which the peak of a rank follows as for any schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autosplit.passes import Kind, Role
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.graph import inputs as graph_inputs
from autosplit.passes.graph import outputs as graph_outputs
from autosplit.passes.lowering.join import joined_role
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.schedule.routes import (
    StageDataflow,
    StageMessage,
    incoming_messages,
    outgoing_messages,
    result_of,
    sender_and_receiver,
)
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.prepared import PreparedSchedule
from autosplit.runtime.functions import SplitFunctions
from autosplit.stage import Stage

from .call_memory import CallMemory


@dataclass(frozen=True, eq=False)
class _Memory:
    """A storage of a microbatch; compared by identity."""

    bytes: int


_Memories = Mapping[Role, _Memory]


class StageBytes:
    """The bytes of one microbatch of a stage, computed call by call.

    Args:
        functions: the stage's functions, at the sizes of the microbatch.
        calls: the memory of the stage's calls.
        received: maps the name of each input that another stage sends to its bytes; the other
            inputs are views of the batch.
        kinds: kinds of the actions that run.

    Attributes:
        memory: the memory between the calls, and of each call with the messages that it uses.
        borrowed_outputs: positions of outputs without memory of their own. Such an output shares
            memory with the stage's saved tensors or with the batch, which lives as long as a
            message needs it.
        fresh: maps the kind of a call to the bytes by which its peak is lower if it creates
            gradients, instead of adding to existing ones.
    """

    def __init__(
        self,
        functions: SplitFunctions,
        calls: CallMemory,
        received: Mapping[str, int],
        kinds: Collection[ActionKind],
    ) -> None:
        self._functions, self._calls = functions, calls
        self.fresh: dict[ActionKind, int] = {}
        inputs = {Role(Kind.INPUT, name): _Memory(size) for name, size in received.items()}
        most, results = self._call(ActionKind.FORWARD, inputs)
        saved = {role: memory for role, memory in results.items() if role.kind is Kind.SAVED}
        outputs = [results.get(Role(Kind.OUTPUT, name)) for name in functions.capture.outputs]
        self.borrowed_outputs = {
            at for at, o in enumerate(outputs) if o is None or o in saved.values()
        }
        self._left: _Memories = {}
        kept, deferred = _bytes(saved), 0
        forward, backward_input, backward_weight, backward = _bytes(inputs) + most - kept, 0, 0, 0
        tangents = {
            Role(Kind.TANGENT, name): _Memory(spec.shape.numel() * spec.dtype.itemsize)
            for name, spec in functions.tangent_specs.items()
        }
        arguments, arrived = {**saved, **tangents}, _bytes(tangents)
        if functions.has_backward and ActionKind.BACKWARD_INPUT in kinds:
            most, results = self._call(ActionKind.BACKWARD_INPUT, arguments)
            left = {
                role: memory for role, memory in results.items() if role.kind is not Kind.INPUT_GRAD
            }
            self._left, deferred = left, _bytes(left)
            backward_input = kept + arrived + most - max(kept, deferred)
            backward_weight, _ = self._call(ActionKind.BACKWARD_WEIGHT, left)
        if functions.has_backward and ActionKind.BACKWARD in kinds:
            most, _ = self._call(ActionKind.BACKWARD, arguments)
            backward = arrived + most
        self.memory = StageMemory(
            kept,
            deferred,
            _bytes(inputs),
            again=calls.again(functions),
            generators=calls.generators,
            workspace=(forward, backward_input, backward_weight, backward),
        )

    def joined_weight(self, count: int) -> int:
        """Bytes by which the peak of one call for the W of ``count`` microbatches exceeds the peak
        of a W of one. The tensors of all ``count`` microbatches are held in both cases.
        """
        roles: dict[_Memory, set[Role]] = defaultdict(set)
        for role, memory in self._left.items():
            roles[memory].add(role)
        released = [
            ({joined_role(role, at) for role in names}, memory.bytes)
            for at in range(count)
            for memory, names in roles.items()
        ]
        live = self._calls.of_call(self._functions, "backward_weight", adds=True, count=count)
        return max(0, live.peak(released) - int(self.memory.workspace[2]))

    def _call(self, kind: ActionKind, arguments: _Memories) -> tuple[int, dict[Role, _Memory]]:
        """Return (peak of a call above the bytes before it, its results by role). Gradients are
        fixed memory (see ``Band``), so only the workspace of adding them counts.
        """
        name = BACKWARDS.get(kind, "forward")
        live = self._calls.of_call(self._functions, name)
        if kind is ActionKind.BACKWARD and not live.input_roles.issuperset(arguments):
            # If I only passes its inputs on to W, B runs the graph of W.
            passed = self._calls.of_call(self._functions, "backward_input").results
            names = {result.memory: result.role for result in passed}
            arguments = {names.get(role, role): memory for role, memory in arguments.items()}
        roles: dict[_Memory, set[Role]] = defaultdict(set)
        for role, argument in arguments.items():
            roles[argument].add(role)
        dying = [(names, memory.bytes) for memory, names in roles.items()]
        borrowed = self._functions.dependence.borrowed
        converted = self._calls.converted_sums(self._functions, name)
        gradients: dict[_Memory | int, int] = {}
        results: dict[Role, _Memory] = {}
        new: dict[int, _Memory] = {}
        for result in live.results:
            role, memory = result.role, result.memory
            if isinstance(memory, int):
                if role.kind is not Kind.PARAMETER_GRAD:
                    results[role] = new.setdefault(memory, _Memory(result.bytes))
                elif role.name not in converted:
                    gradients[memory] = result.bytes
            elif memory is not None and memory in arguments:
                if role.kind is not Kind.PARAMETER_GRAD:
                    results[role] = arguments[memory]
                elif role.name not in {*borrowed, *converted}:  # computed by I; now it is the sum
                    gradients[arguments[memory]] = result.bytes
        own_gradients = sum(gradients.values())
        most = fresh = live.peak(dying) - own_gradients - sum(converted.values())
        if converted:  # all of them are alive until the last is converted
            most = fresh = max(fresh, live.end(dying) - own_gradients)
        if gradients or converted:
            adding = self._calls.of_call(self._functions, name, adds=True)
            workspace = self._calls.addition_workspace(self._functions, name) if converted else 0
            most = max(most, adding.peak(dying), adding.end(dying) + workspace)
        self.fresh[kind] = most - fresh
        return most, results


def _bytes(memories: _Memories) -> int:
    return sum(memory.bytes for memory in {*memories.values()})


def received_bytes(
    functions: SplitFunctions, index: int, dataflow: StageDataflow, boundaries: Boundaries
) -> dict[str, int]:
    """Maps the name of each input of stage ``index`` that another stage sends to its bytes."""
    sources = dataflow.sources(index)
    metas: dict[tuple[int | None, int], TensorMeta] = {
        (source, position): meta
        for source in sources
        for position, meta in enumerate(boundaries.outputs[source])
    }
    names = functions.capture.inputs  # after these come the targets, from the batch
    keys: list[tuple[int | None, int]] = [*metas]
    if dataflow.wiring is not None:
        keys = [(source.stage, source.position) for source in dataflow.wiring.inputs[index]]
    pairs = zip(names, keys, strict=False)
    return {name: _size(metas[key]) for name, key in pairs if key in metas}


def largest_boundaries(rows: Sequence[Boundaries]) -> Boundaries:
    """The boundaries that have, for each tensor, the most bytes of any of ``rows``."""
    outputs = {}
    for stage in rows[0].outputs:
        metas_by_output = zip(*(row.outputs[stage] for row in rows), strict=True)
        outputs[stage] = tuple(max(metas, key=_size) for metas in metas_by_output)
    return rows[0].of_other_sizes(outputs)


def message_levels(
    schedule: Schedule,
    rank: int,
    dataflow: StageDataflow,
    boundaries: Boundaries,
    borrowed: Mapping[int, Collection[int]],
) -> list[int]:
    """Bytes of a rank's messages while each action of its row runs, as ``Transport`` keeps them.

    Args:
        schedule: the schedule.
        rank: the rank.
        dataflow: the dataflow between stages.
        boundaries: shapes of the tensors between stages.
        borrowed: for each stage of this rank, positions of outputs whose memory is counted
            elsewhere.
    """
    prepared = PreparedSchedule(schedule, dataflow)
    posts, routes = prepared.recv_posts[rank], prepared.routes[rank]
    coming = {peer: deque(messages) for peer, messages in routes.receives.items()}
    sent: dict[int, deque[StageMessage]] = defaultdict(deque)
    retired: Counter[int] = Counter()
    holders: Counter[tuple[Action, int]] = Counter()  # of each tensor, how many messages hold it
    now = 0

    def add_holders(message: StageMessage, more: int) -> None:
        """Add ``more`` holders to a message's tensors, or remove holders if ``more`` is negative.
        Tensors with holders count as memory.
        """
        nonlocal now
        metas = boundaries.tensors_in(message, dataflow)
        places = dataflow.positions(message.boundary, message.taker) or range(len(metas))
        for place, meta in zip(places, metas, strict=True):
            if meta is None or (message.forward and place in borrowed.get(message.boundary, ())):
                continue
            count = holders[message.result, place]
            holders[message.result, place] += more
            now += _size(meta) * ((count + more > 0) - (count > 0))

    levels = []
    for action in schedule.ranks[rank]:
        if not action.kind.is_compute:
            levels.append(now)
            continue
        for peer in posts.get(action, ()):
            add_holders(coming[peer].popleft(), 1)
        for message in incoming_messages(action, dataflow):
            if message in routes.acked_sends:  # it comes from another rank
                peer, _ = sender_and_receiver(message, schedule)
                is_sent = any(boundaries.tensors_in(message, dataflow))
                while is_sent and retired[peer] < routes.acked_sends[message]:
                    add_holders(sent[peer].popleft(), -1)
                    retired[peer] += 1
            add_holders(message, -1)  # now it counts as the stage's
        levels.append(now)
        if action.kind is ActionKind.FORWARD and action.stage == schedule.stages - 1:
            now += sum(map(_size, boundaries.outputs[action.stage]))  # losses stay until the end
        for message in outgoing_messages(result_of(action), dataflow):
            add_holders(message, 1)
            _, target = sender_and_receiver(message, schedule)
            if target != rank:
                sent[target].append(message)
    return levels


def _size(meta: TensorMeta) -> int:
    return meta.shape.numel() * meta.dtype.itemsize


# --- from the boundaries of a stage's graphs alone ------------------------------------------------


def footprint(stage: TrainableStage) -> tuple[float, float]:
    """Bytes that a stage keeps for one microbatch: (saved tensors, deferred tensors).

    For a stage without graphs (1, 1), so that microbatches are counted instead of bytes.
    """
    memory = stage_memory(stage)
    return memory.saved, memory.deferred


def stage_memory(stage: TrainableStage) -> StageMemory:
    """The ``footprint`` of a stage and the bytes of its inputs, as a ``StageMemory``."""
    return graph_memory(stage.functions) if isinstance(stage, Stage) else StageMemory(1.0, 1.0)


def graph_memory(functions: SplitFunctions) -> StageMemory:
    """As ``stage_memory``, for the functions of a stage at the sizes of a microbatch."""
    graphs = functions.graphs
    if graphs.backward_input is None:
        return StageMemory(0.0, 0.0)
    kept = [
        [node for _, node in graph_outputs(graphs.forward.graph, Kind.SAVED)],
        [node for _, node in graph_outputs(graphs.backward_input.graph, Kind.DEFERRED)],
        [*graph_inputs(graphs.forward.graph, Kind.INPUT).values()],
    ]
    return StageMemory(*(float(distinct_bytes(nodes, functions.size)) for nodes in kept))
