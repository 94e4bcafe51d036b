"""The graph of a range of operations, and the stage's module that runs it."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import checkpoint

from autosplit.capture.forward_graph import Switches, enters_autocast
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
        shapes: the shapes of the inputs; None for an input that this mode does not read.
        structure: a function that rebuilds the model's result from the tensors of the last stage;
            None in other stages.
        device: the device of the capture.
    """

    graph: fx.GraphModule
    state: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
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

    def sent_specs(self) -> list[list[tuple[Any, ...]]]:
        """Per stage except the last, shapes and dtypes of the tensors that it sends."""
        values = ([self.line.value(node) for node in sent] for sent in self.sent)
        return [[(tuple(v.shape), v.dtype) for v in stage_values] for stage_values in values]

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
        for index, node in enumerate(inputs):
            placeholder = _input(graph, f"input_{index}", line, node)
            if node is not None:
                new[node] = placeholder
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
        shapes = tuple(None if n is None else tuple(line.given_value(n).shape) for n in inputs)
        module = fx.GraphModule(root, graph, "StageGraph")
        return StageGraph(module, names, shapes, structure, line.device)


def _order(source: Source) -> tuple[int, int]:
    return (-1 if source.stage is None else source.stage, source.position)


def _input(graph: fx.Graph, name: str, line: OperationSequence, node: fx.Node | None) -> fx.Node:
    """A placeholder for the value of a node, in the order of dimensions that the value has in the
    model (see ``line.layout``).
    """
    placeholder = graph.placeholder(name)
    order = line.layout(node) if node is not None and node in line.position else None
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


class StageModule(nn.Module):
    """A stage of a model. Its parameters and buffers keep their names in the model.

    A stage takes tensors and returns a tuple of tensors; the last stage returns the model's result.

    Args:
        index: the stage.
        programs: the graph of each captured mode: training (True), evaluation (False).
        model: the whole model.
        names: the names of the model's parameters and buffers in this stage.
        capture: a function that returns the graph of the mode that ``programs`` lacks; called at
            the first use of that mode.

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
        capture: Callable[[], StageGraph] | None = None,
    ) -> None:
        super().__init__()
        self.tied_elsewhere: tuple[str, ...] = ()
        self.cuts: tuple[str, ...] = ()
        self._index = index
        self._programs, self._capture = dict(programs), capture
        register_state(self, model, names)

    def forward(self, *inputs: Tensor) -> Any:
        """Run the stage.

        Raises:
            PlanError: the shapes differ from the capture's, or the model cannot be cut in this
                mode.
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
            self._capture_mode()
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> StageModule:
        """Move parameters and buffers, as ``to`` does, and the graphs with them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for mode, program in self._programs.items():
            device = fn(torch.empty(0, device=program.device)).device
            self._programs[mode] = program.moved(device)
        return self

    def check_inputs(self, inputs: Sequence[Tensor | None]) -> StageGraph:
        """Check the inputs' number and shapes, and return the graph for the present mode.

        Args:
            inputs: the arguments; None for an argument that is not known yet.

        Raises:
            PlanError: the number or the shapes of inputs differ from the capture's, or the model
                cannot be cut in this mode.
        """
        self._capture_mode()
        program = self._programs[self.training]
        if len(inputs) != len(program.shapes):
            raise PlanError(
                f"stage {self._index} takes {len(program.shapes)} tensors, got {len(inputs)}: pass "
                "the outputs of earlier stages that it reads"
            )
        for position, (tensor, shape) in enumerate(zip(inputs, program.shapes, strict=True)):
            if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
                raise PlanError(
                    f"stage {self._index}: input {position} has shape {list(tensor.shape)}, but "
                    f"the model was captured with {list(shape)}; cut the model again for "
                    "microbatches of this size, pad them, or drop a smaller last batch"
                )
        return program

    def _capture_mode(self) -> None:
        """Capture the stage in its present mode, unless it is captured already.

        Raises:
            PlanError: the model cannot be cut in this mode.
        """
        # Graphs are guarded by what a forward reads here: nothing that a capture changes.
        if self.training in self._programs or self._capture is None:
            return
        device = self._programs[not self.training].device  # moved with the stage
        self._programs[self.training] = self._capture().moved(device)
        self._capture = None  # it holds the whole model


def _find(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
