"""The graph of a range of operations, and the stage's module that runs it."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import checkpoint

from autosplit.capture.forward_graph import Switches, enters_autocast
from autosplit.capture.forward_sizes import ArgumentSizes
from autosplit.capture.size_rule import Leaf, SizeFunction, SizeRule
from autosplit.errors import PlanError
from autosplit.pipeline.schedule.routes import Source
from autosplit.planner.operation_sequence import OperationSequence
from autosplit.torch_internals.pytree import tree_unflatten
from autosplit.torch_internals.state import register_state


@dataclass(frozen=True)
class StageGraph:
    """The graph of a stage in one mode, training or evaluation.

    Attributes:
        graph: takes the state in the order of ``state``, then the inputs; returns a tuple.
        state: names of the parameters and buffers.
        shapes: the shapes of the inputs in the capture; None for an input that this mode does not
            read.
        conditions: conditions on the sizes of the inputs under which the graph is valid.
        accepts: a function of the inputs' shapes that returns None if the graph is not valid.
        structure: a function that rebuilds the model's result from the tensors of the last stage;
            None in other stages.
        device: the device of the capture.
    """

    graph: fx.GraphModule
    state: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    conditions: tuple[str, ...]
    accepts: SizeFunction
    structure: Callable[[Sequence[Tensor]], Any] | None
    device: torch.device

    def moved(self, device: torch.device) -> StageGraph:
        """The graph for another device. The capture's device is a constant in the graph, from uses
        such as ``x.device`` or ``autocast(x.device.type)``, and is replaced.
        """
        if device == self.device:
            return self
        graph = copy.deepcopy(self.graph).to(device)
        for part in graph.modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.nodes:
                    _move(node, self.device, device)
                part.recompile()
        return replace(self, graph=graph, device=device)


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

    def sizes_of(self, arguments: Sequence[fx.Node | None]) -> ArgumentSizes:
        """The symbolic sizes, as a stage with these arguments reads them.

        Raises:
            PlanError: all sizes are numbers.
        """
        sizes = self.line.forward.sizes
        if sizes is None:
            raise PlanError("the model was captured without open sizes")
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
            plain: whether the last stage, too, returns a tuple of tensors.
        """
        line, nodes = self.line, self.nodes[index]
        inputs: Sequence[fx.Node | None] = self.received[index] if arguments is None else arguments
        last = index == len(self.places)
        results = line.results if last else self.sent[index]
        forward, graph = line.forward, fx.Graph()
        read = {n for node in nodes for n in node.all_input_nodes} | set(results)
        state = [node for node in line.ordered(read) if node in forward.state]
        names = tuple(dict.fromkeys(forward.state[node] for node in state))
        placeholders = {name: graph.placeholder(_identifier(name)) for name in names}
        new = {node: placeholders[forward.state[node]] for node in state}
        passed = [graph.placeholder(f"input_{at}") for at in range(len(inputs))]
        for placeholder, argument in zip(passed, inputs, strict=True):
            if argument is not None:
                new[argument] = _restored(graph, placeholder, line, argument)
        if sizes := read & forward.size_nodes:
            new.update(self._write_sizes(graph, line.ordered(sizes), inputs, passed))
        constants = line.ordered(read - set(new) - set(nodes))
        values = [forward.constants.get(node, line.value(node)) for node in constants]
        root: dict[str, Any] = {f"constant_{at}": value for at, value in enumerate(values)}
        new.update(zip(constants, map(graph.get_attr, root), strict=True))
        switches = Switches(graph)
        for node in nodes:
            switches.to(line.settings[node])
            new[node] = _copy(graph, node, new)
        switches.to(type(line.settings[nodes[0]])())
        if last:
            graph.output(tuple(new[node] for node in results))
        else:
            graph.output(tuple(_permuted(graph, new[n], line.layout(n)) for n in results))
        structure = _structure(line) if last and not plain else None
        module = fx.GraphModule(root, graph, "StageGraph")
        shapes, rule = self._shapes(inputs), self._size_rule(inputs)
        # A trace of the stage reads the compiled rule.
        accepts = rule.as_function()
        return StageGraph(module, names, shapes, rule.conditions, accepts, structure, line.device)

    def _shapes(self, inputs: Sequence[fx.Node | None]) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes of a stage's arguments in the capture."""
        forward = self.line.forward
        values = (None if n is None else forward.concrete(self.line.given_value(n)) for n in inputs)
        return tuple(None if value is None else tuple(value.shape) for value in values)

    def _write_sizes(
        self,
        graph: fx.Graph,
        nodes: Iterable[fx.Node],
        inputs: Sequence[fx.Node | None],
        arguments: Sequence[fx.Node],
    ) -> dict[fx.Node, Any]:
        """Write the nodes that compute sizes from the stage's arguments into a stage's graph.

        Args:
            graph: the stage's graph.
            nodes: the nodes of sizes that the stage reads.
            inputs: the nodes of the stage's arguments.
            arguments: the placeholders of the arguments.

        Raises:
            PlanError: a size does not follow from the sizes of the arguments.
        """
        sizes = self.sizes_of(inputs)

        def size_of(argument: int, dimension: int) -> fx.Proxy:
            return fx.Proxy(graph.call_method("size", (arguments[argument], dimension)))

        try:
            return {node: sizes.write(self.line.value(node), size_of) for node in nodes}
        except KeyError as error:
            raise PlanError(
                f"a stage reads the size {error.args[0]}, which does not follow from the sizes of "
                "the tensors that it receives: cut elsewhere (cut_at=), or pass stages as a list"
            ) from error

    def _size_rule(self, inputs: Sequence[fx.Node | None]) -> SizeRule:
        """The sizes of a stage's arguments for which its graph is valid."""
        if self.line.forward.sizes is not None:
            return self.sizes_of(inputs).rule(len(inputs))
        shapes = self._shapes(inputs)
        texts = tuple(None if shape is None else tuple(map(str, shape)) for shape in shapes)
        return SizeRule((), texts, (), ())


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


def _copy(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, new.__getitem__)
    kept = ("stack_trace", "nn_module_stack")
    copy.meta = {key: node.meta[key] for key in kept if key in node.meta}
    if str(node.target) == "tag_activation_checkpoint":
        # The operator is for graphs only: run eagerly, it would draw other random numbers when it
        # recomputes. The function that the user called is right in both.
        copy.target = checkpoint
        copy.kwargs = {**copy.kwargs, "use_reentrant": False}
    return copy


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


@dataclass
class _ModeGraphs:
    """The graphs of a stage in one mode, in the order of their captures.

    This is a linked list, because Dynamo guards everything that it reads. A trace of the stage
    reads the graphs up to the one that fits. So graphs that are added later do not invalidate it.

    Attributes:
        graph: the first graph.
        later: the others; None if there are none.
    """

    graph: StageGraph
    later: _ModeGraphs | None = None

    @classmethod
    def of(cls, graphs: Iterable[StageGraph]) -> _ModeGraphs | None:
        """A list of these graphs; None if there are none."""
        result = None
        for graph in reversed([*graphs]):
            result = cls(graph, result)
        return result

    def __iter__(self) -> Iterator[_ModeGraphs]:
        link: _ModeGraphs | None = self
        while link is not None:
            yield link
            link = link.later


GraphsOf: TypeAlias = "Callable[[bool, Sequence[Sequence[Leaf]], int], list[StageGraph]]"
"""``graphs_of(training, rows, skip)`` returns a stage's graphs in a mode, training or evaluation,
in the order of their captures and without the first ``skip`` ones: the graph for the sizes of the
example, then graphs for other sizes. Graphs that are missing for microbatches of these sizes are
captured. ``rows`` has the sizes of the model's inputs for each microbatch.
"""


class StageModule(nn.Module):
    """A stage of a model. Its parameters and buffers keep their names in the model.

    A stage takes tensors and returns a tuple of tensors; the last stage returns the model's result.

    Args:
        index: the stage.
        programs: the graph of each captured mode: training (True), evaluation (False).
        model: the whole model.
        names: the names of the model's parameters and buffers in this stage.
        capture: captures graphs for other modes and sizes; None: there are none.

    Attributes:
        tied_elsewhere: the names of the stage's parameters that other stages have, too.
        cuts: the names of the first blocks of all stages of the model but the first.
    """

    def __init__(
        self,
        index: int,
        programs: Mapping[bool, StageGraph],
        model: nn.Module,
        names: Iterable[str],
        capture: GraphsOf | None = None,
    ) -> None:
        super().__init__()
        self.tied_elsewhere: tuple[str, ...] = ()
        self.cuts: tuple[str, ...] = ()
        self._index = index
        # Not a dictionary: a trace in one mode guards all keys.
        self._training_graphs, self._evaluation_graphs = (
            _ModeGraphs(programs[mode]) if mode in programs else None for mode in (True, False)
        )
        self._capture = capture
        register_state(self, model, names)

    def forward(self, *inputs: Tensor) -> Any:
        """Run the stage.

        Raises:
            PlanError: there is no graph for inputs of these shapes (see ``take_sizes``), or the
                model cannot be cut in this mode.
        """
        program = self.check_inputs(inputs)
        results = program.graph(*[_find(self, name) for name in program.state], *inputs)
        return results if program.structure is None else program.structure(results)

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode, and capture the stage in it if needed. A capture at the first call could
        run inside a trace by the caller. The first call raises an error of the capture.
        """
        super().train(mode)
        with contextlib.suppress(PlanError):
            self._graphs_in(self.training)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> StageModule:
        """Move parameters and buffers, as ``to`` does, and the graphs with them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for graphs in filter(None, (self._training_graphs, self._evaluation_graphs)):
            device = fn(torch.empty(0, device=graphs.graph.device)).device
            for link in graphs:
                link.graph = link.graph.moved(device)
        return self

    def take_sizes(self, rows: Sequence[Sequence[Leaf]], *, training: bool) -> None:
        """Capture the stage for microbatches for which it has no graph yet.

        Args:
            rows: the sizes of the whole model's inputs, for each microbatch.
            training: the mode, training or evaluation, in which the microbatches will run.

        Raises:
            CaptureError: the model cannot be captured for a microbatch.
            PlanError: the model cannot be cut at the present cuts in this mode, or for a
                microbatch.
        """
        links = [*self._graphs_in(training)]
        if self._capture is not None:
            device = links[0].graph.device
            new = self._capture(training, rows, len(links))
            links[-1].later = _ModeGraphs.of(graph.moved(device) for graph in new)

    def check_inputs(self, inputs: Sequence[Tensor]) -> StageGraph:
        """Check the inputs' number and shapes, and return the graph for them in the present mode.

        Raises:
            PlanError: another number of inputs, no graph for their shapes, or the model cannot be
                cut in this mode.
        """
        first = self._graphs_in(self.training)
        example = first.graph.shapes
        if len(inputs) != len(example):
            raise PlanError(
                f"stage {self._index} takes {len(example)} tensors, got {len(inputs)}: pass the "
                "outputs of earlier stages that it reads"
            )
        shapes = [tuple(tensor.shape) for tensor in inputs]
        graphs: _ModeGraphs | None = first
        while graphs is not None:
            if graphs.graph.accepts(shapes) is not None:
                return graphs.graph
            graphs = graphs.later
        pairs = enumerate(zip(shapes, example, strict=True))
        position = next(at for at, (shape, expected) in pairs if expected not in (None, shape))
        raise PlanError(
            f"stage {self._index}: input {position} has shape {list(shapes[position])}, but the "
            f"model was captured with {list(example[position] or ())}; run the stages in a "
            "PipelineTrainer, which captures them for other sizes, or cut the model again"
        )

    def _graphs_in(self, training: bool) -> _ModeGraphs:
        """The graphs of a mode. The stage is captured in it unless it is captured already.

        Raises:
            PlanError: the model cannot be cut in this mode.
        """
        graphs = self._training_graphs if training else self._evaluation_graphs
        if graphs is not None:
            return graphs
        other = self._evaluation_graphs if training else self._training_graphs
        if other is None or self._capture is None:
            raise PlanError(f"stage {self._index} has no graph for {_mode(training)}")
        device = other.graph.device  # moved with the stage
        captured = (graph.moved(device) for graph in self._capture(training, (), 0))
        graphs = _ModeGraphs.of(captured)
        if graphs is None:
            raise PlanError(f"stage {self._index} has no graph for {_mode(training)}")
        if training:
            self._training_graphs = graphs
        else:
            self._evaluation_graphs = graphs
        return graphs


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _find(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
