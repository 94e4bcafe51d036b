"""The operations of each stage of a cut model, and their graphs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import checkpoint

from autosplit.capture.forward_sizes import ArgumentSizes, holds_size
from autosplit.capture.mode_switches import Switches, enters_autocast
from autosplit.capture.size_rule import SizeFunction, SizeRule
from autosplit.errors import PlanError
from autosplit.pipeline.schedule.routes import Source
from autosplit.planner.operation_sequence import OperationSequence
from autosplit.planner.stage_blocks import BlockCall, block_calls
from autosplit.torch_internals.pytree import tree_unflatten


@dataclass(frozen=True)
class BlockGraph:
    """The graph of one kind of block, which stages call.

    Attributes:
        graph: takes the state in the order of ``state``, then the inputs; returns a tuple.
        state: names of the parameters and buffers in the block.
    """

    graph: fx.GraphModule
    state: tuple[str, ...]


@dataclass(frozen=True)
class StageGraph:
    """The graph of a stage in one mode, training or evaluation.

    Attributes:
        graph: takes the state in the order of ``state``, then the modules of ``blocks``, then the
            inputs; returns a tuple.
        state: names of the parameters and buffers.
        blocks: names of the modules that the graph calls.
        kinds: the graphs of these modules, by the name that the calls pass.
        shapes: the shapes of the inputs in the capture; None for an input that this mode does not
            read.
        conditions: conditions on the sizes of the inputs under which the graph is valid.
        accepts: a function of the inputs' shapes that returns None if the graph is not valid.
        structure: a function that rebuilds the model's result from the tensors of the last stage;
            None in other stages.
        device: the device of the capture.
        aux_losses: the attribute of each auxiliary loss that the graph returns after its other
            results.
    """

    graph: fx.GraphModule
    state: tuple[str, ...]
    blocks: tuple[str, ...]
    kinds: Mapping[str, BlockGraph]
    shapes: tuple[tuple[int, ...] | None, ...]
    conditions: tuple[str, ...]
    accepts: SizeFunction
    structure: Callable[[Sequence[Tensor]], Any] | None
    device: torch.device
    aux_losses: tuple[str, ...] = ()

    def moved(self, device: torch.device) -> StageGraph:
        """The graph for another device. The capture's device is a constant in the graph, from uses
        such as ``x.device`` or ``autocast(x.device.type)``, and is replaced.
        """
        if device == self.device:
            return self
        graph = _moved(self.graph, self.device, device)
        kinds = {
            name: replace(kind, graph=_moved(kind.graph, self.device, device))
            for name, kind in self.kinds.items()
        }
        return replace(self, graph=graph, kinds=kinds, device=device)


class StageLayout:
    """The operations, inputs and messages of every stage.

    Args:
        line: the operations.
        places: position of the first operation of every stage except the first.

    Attributes:
        nodes: per stage, its operations, with replicated operations.
        sent: per stage except the last, the operations whose values other stages read.
        received: per stage, the nodes of its arguments, in order.
    """

    def __init__(self, line: OperationSequence, places: Sequence[int]) -> None:
        self.line = line
        self.places = [*places]
        bounds = [*itertools.pairwise([0, *places, len(line.body)])]
        self._stage = {n: at for at, (a, b) in enumerate(bounds) for n in line.body[a:b]}
        self.sent = [
            [n for n in line.body[first:last] if line.last_use[n] >= last]
            for first, last in bounds[:-1]
        ]
        parts = [line.part(first, last) for first, last in bounds]
        self.nodes = [nodes for nodes, _ in parts]
        # Each stage has its own state and constants.
        inputs = line.forward.inputs
        outside = [[n for n in read if n in inputs or n in line.position] for _, read in parts]
        self.received = [
            sorted(read, key=lambda node: _order(self.argument_source(node))) for read in outside
        ]

    def argument_source(self, node: fx.Node) -> Source:
        """The source of a stage's argument."""
        position = self.line.forward.inputs.get(node)
        if position is not None:
            return Source(None, position)
        stage = self._stage[node]
        return Source(stage, self.sent[stage].index(node))

    def node_of(self, source: Source) -> fx.Node | None:
        """The node of a stage's argument; None for an input that the model does not read."""
        if source.stage is not None:
            return self.sent[source.stage][source.position]
        inputs = self.line.forward.inputs
        return next((n for n, position in inputs.items() if position == source.position), None)

    def sizes_of(self, arguments: Sequence[fx.Node | None]) -> ArgumentSizes | None:
        """The symbolic sizes, as a stage with these arguments reads them; None if all sizes are
        numbers.
        """
        sizes = self.line.forward.sizes
        if sizes is None:
            return None
        values = enumerate(None if n is None else self.line.given_value(n) for n in arguments)
        return sizes.of_arguments({at: value for at, value in values if value is not None})

    def program(
        self, index: int, arguments: Sequence[fx.Node | None] | None = None, *, plain: bool = False
    ) -> StageGraph:
        """The graph of a stage.

        Args:
            index: the stage.
            arguments: the nodes of the stage's arguments, if they differ from ``received``; None
                for an argument that the stage does not read.
            plain: whether the last stage, too, returns a tuple of tensors, and no block is a
                module of its own.
        """
        inputs: Sequence[fx.Node | None] = self.received[index] if arguments is None else arguments
        last = index == len(self.places)
        returned = self.line.results if last else self.sent[index]
        named = [] if plain else self._aux_losses(index)
        losses = [node for _, node in named]
        calls = [] if plain else block_calls(self.line, self.nodes[index], [*returned, *losses])
        kinds = _block_graphs(self.line, calls)
        calls = [call for call in calls if call.kind in kinds]
        writer = _GraphWriter(self.line, self.nodes[index], inputs, self.sizes_of(inputs), calls)
        writer.write_inputs(returned)
        writer.write_operations()
        if last:
            writer.write_results([*returned, *losses])
        else:
            writer.write_messages(returned, losses)
        rule = self._size_rule(inputs)
        return StageGraph(
            fx.GraphModule(writer.root, writer.graph, "StageGraph"),
            writer.state,
            tuple(call.name for call in calls),
            kinds,
            self._shapes(inputs),
            rule.conditions,
            rule.as_function(),  # now, because a trace of the stage reads it
            _structure(self.line) if last and not plain else None,
            self.line.device,
            tuple(name for name, _ in named),
        )

    def _aux_losses(self, index: int) -> list[tuple[str, fx.Node]]:
        """(name of the attribute, node) of each auxiliary loss of a stage."""
        losses = self.line.forward.aux_losses.items()
        return [
            (name, node) for name, nodes in losses for node in nodes if self._stage[node] == index
        ]

    def _shapes(self, inputs: Sequence[fx.Node | None]) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes of a stage's arguments in the capture."""
        forward = self.line.forward
        values = (None if n is None else forward.concrete(self.line.given_value(n)) for n in inputs)
        return tuple(None if value is None else tuple(value.shape) for value in values)

    def _size_rule(self, inputs: Sequence[fx.Node | None]) -> SizeRule:
        """The sizes of a stage's arguments for which its graph is valid."""
        sizes = self.sizes_of(inputs)
        return (
            SizeRule.fixed(self._shapes(inputs), ()) if sizes is None else sizes.rule(len(inputs))
        )


class _GraphWriter:
    """Writes the graph of a stage, or of a block that stages call.

    Args:
        line: the operations of the model.
        nodes: the operations of the stage, in order.
        inputs: the nodes of the stage's arguments; None for one that the stage does not read.
        sizes: the symbolic sizes of the arguments; None if all sizes are numbers.
        calls: the blocks that the graph calls.

    Attributes:
        graph: the graph.
        root: the constants of the graph by name.
        state: names of the parameters and buffers that the graph reads.
    """

    def __init__(
        self,
        line: OperationSequence,
        nodes: Sequence[fx.Node],
        inputs: Sequence[fx.Node | None],
        sizes: ArgumentSizes | None = None,
        calls: Sequence[BlockCall] = (),
    ) -> None:
        self._line, self._inputs, self._sizes = line, inputs, sizes
        self._size_nodes = line.forward.size_nodes
        self._calls = {call.nodes[0]: call for call in calls}
        called = {node for call in calls for node in call.nodes}
        self._nodes = [node for node in nodes if node not in called or node in self._calls]
        self._copies: dict[fx.Node, fx.Node] = {}
        self._blocks: dict[str, fx.Node] = {}
        self._arguments: list[fx.Node] = []
        self.graph = fx.Graph()
        self.root: dict[str, Any] = {}
        self.state: tuple[str, ...] = ()

    def write_inputs(self, results: Iterable[fx.Node], *, messages: bool = True) -> None:
        """Write the placeholders of state, then those of blocks and of arguments, then constants.

        Args:
            results: the nodes that the stage returns.
            messages: whether arguments have the order of dimensions of messages.
        """
        line, graph, copies = self._line, self.graph, self._copies
        forward = line.forward
        read = {n for node in self._nodes for n in self._read_by(node)} | {*results}
        state = [node for node in line.ordered(read) if node in forward.state]
        self.state = tuple(dict.fromkeys(forward.state[node] for node in state))
        placeholders = {name: graph.placeholder(_identifier(name)) for name in self.state}
        copies.update({node: placeholders[forward.state[node]] for node in state})
        names = [call.name for call in self._calls.values()]
        self._blocks = {name: graph.placeholder(f"block_{at}") for at, name in enumerate(names)}
        self._arguments = [graph.placeholder(f"input_{at}") for at in range(len(self._inputs))]
        for argument, node in zip(self._arguments, self._inputs, strict=True):
            if node is not None:
                copies[node] = _restored(graph, argument, line, node) if messages else argument
        computed = {*self._nodes, *(n for call in self._calls.values() for n in call.results)}
        constants = line.ordered(read - {*copies} - computed - self._size_nodes)
        values = [forward.constants.get(node, line.value(node)) for node in constants]
        self.root = {f"constant_{at}": value for at, value in enumerate(values)}
        copies.update(zip(constants, map(graph.get_attr, self.root), strict=True))

    def _read_by(self, node: fx.Node) -> Sequence[fx.Node]:
        """The nodes that an operation reads. If a block begins with the operation, the block's
        inputs."""
        call = self._calls.get(node)
        return node.all_input_nodes if call is None else call.inputs

    def write_operations(self) -> None:
        """Write the operations, with the grad mode and autocast of each.

        Raises:
            PlanError: a size follows from no tensor that the stage receives or computes.
        """
        line, switches = self._line, Switches(self.graph)
        callers = type(line.settings[self._nodes[0]])()
        for node in self._nodes:
            if node in self._calls:
                switches.to(callers)  # the block switches by itself
                self._write_call(self._calls[node])
                continue
            switches.to(line.settings[node])
            copy = self._copies[node] = self._copy(node)
            if self._sizes is not None:
                self._sizes.use_computed(copy, line.value(node))
        switches.to(callers)

    def _write_call(self, call: BlockCall) -> None:
        inputs = [self._copies[node] for node in call.inputs]
        results = self.graph.call_function(
            call_block, (self._blocks[call.name], call.kind, *inputs)
        )
        for at, node in enumerate(call.results):
            copy = self._copies[node] = self.graph.call_function(operator.getitem, (results, at))
            if self._sizes is not None:
                self._sizes.use_computed(copy, self._line.value(node))

    def write_results(self, results: Iterable[fx.Node]) -> None:
        """Return the results of the model."""
        self.graph.output(tuple(self._copies[node] for node in results))

    def write_messages(self, sent: Iterable[fx.Node], losses: Iterable[fx.Node]) -> None:
        """Return the tensors that the stage sends, in the order of dimensions of messages, and then
        its auxiliary losses.
        """
        copies, line = self._copies, self._line
        messages = [_permuted(self.graph, copies[n], line.layout(n)) for n in sent]
        self.graph.output((*messages, *(copies[node] for node in losses)))

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, self._copy_of)
        if self._sizes is not None:
            with self.graph.inserting_before(copy):  # sizes that Dynamo writes as constants
                copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), self._with_sizes)
        kept = ("stack_trace", "nn_module_stack")
        copy.meta = {key: node.meta[key] for key in kept if key in node.meta}
        if str(node.target) == "tag_activation_checkpoint":
            # The operator is for graphs only: run eagerly, it would draw other random numbers when
            # it recomputes. The function that the user called is right in both.
            copy.target = checkpoint
            copy.kwargs = {**copy.kwargs, "use_reentrant": False}
        return copy

    def _copy_of(self, node: fx.Node) -> Any:
        is_size = node in self._size_nodes
        return self._with_sizes(self._line.value(node)) if is_size else self._copies[node]

    def _with_sizes(self, value: Any) -> Any:
        """An argument of a node. Symbolic sizes become nodes of the stage's graph."""
        if self._sizes is None or not holds_size(value):
            return value
        try:
            return self._sizes.write(value, self._arguments)
        except KeyError as error:
            raise PlanError(
                f"a stage reads the size {error.args[0]}, which does not follow from the sizes of "
                "the tensors that it receives: cut elsewhere (cut_at=), or pass stages as a list"
            ) from error


def call_block(block: Any, kind: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Call a block of a stage; nodes of the stage's graph have this target."""
    result: tuple[Tensor, ...] = block(kind, *inputs)
    return result


def _block_graphs(line: OperationSequence, calls: Sequence[BlockCall]) -> dict[str, BlockGraph]:
    """The graph of each kind of block, without kinds that read a size which follows from no
    input.
    """
    graphs: dict[str, BlockGraph] = {}
    for kind, call in {call.kind: call for call in reversed(calls)}.items():
        with contextlib.suppress(PlanError):
            graphs[kind] = _block_graph(line, call)
    return graphs


def _block_graph(line: OperationSequence, call: BlockCall) -> BlockGraph:
    """The graph of a block's call.

    Raises:
        PlanError: the block reads a size that follows from none of its inputs.
    """
    inputs = {at: line.value(node) for at, node in enumerate(call.inputs)}
    sizes = line.forward.sizes
    arguments = None if sizes is None else sizes.of_arguments(inputs)
    writer = _GraphWriter(line, call.nodes, call.inputs, arguments)
    writer.write_inputs(call.results, messages=False)
    writer.write_operations()
    writer.write_results(call.results)
    state = tuple(name.removeprefix(f"{call.name}.") for name in writer.state)
    return BlockGraph(fx.GraphModule(writer.root, writer.graph, "BlockGraph"), state)


def _moved(graph: fx.GraphModule, old: torch.device, new: torch.device) -> fx.GraphModule:
    """A copy of a graph for another device."""
    copied = copy.deepcopy(graph).to(new)
    for part in copied.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                _move(node, old, new)
            part.recompile()
    return copied


def _order(source: Source) -> tuple[int, int]:
    return (-1 if source.stage is None else source.stage, source.position)


def _restored(
    graph: fx.Graph, placeholder: fx.Node, line: OperationSequence, node: fx.Node
) -> fx.Node:
    """The value of a stage's argument, in the order of dimensions that it has in the model (see
    ``line.layout``).
    """
    order = line.layout(node) if node in line.position else None
    inverse = None if order is None else sorted(range(len(order)), key=order.__getitem__)
    return _permuted(graph, placeholder, inverse)


def _permuted(graph: fx.Graph, node: fx.Node, order: Sequence[int] | None) -> fx.Node:
    return node if order is None else graph.call_method("permute", (node, list(order)))


def _move(node: fx.Node, old: torch.device, new: torch.device) -> None:
    def moved(value: Any) -> Any:
        same = isinstance(value, torch.device) and value.type == old.type
        return new if same and value.index in (None, old.index) else value

    node.args = map_aggregate(node.args, moved)
    node.kwargs = map_aggregate(node.kwargs, moved)
    knows = torch.amp.is_autocast_available(new.type)
    if knows and enters_autocast(node) and node.args[0] == old.type:
        node.update_arg(0, new.type)


def _structure(line: OperationSequence) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that rebuilds the model's outputs from its output tensors."""
    count, spec = itertools.count(), line.forward.spec
    leaves = [
        (next(count), None) if isinstance(leaf, fx.Node) else (None, leaf)
        for leaf in line.forward.leaves
    ]

    def rebuilt(tensors: Sequence[Tensor]) -> Any:
        return tree_unflatten(
            [constant if at is None else tensors[at] for at, constant in leaves], spec
        )

    return rebuilt


def _identifier(name: str) -> str:
    return "state_" + "".join(c if c.isalnum() else "_" for c in name)
