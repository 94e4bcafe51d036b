"""The backend of ``torch.compile(model, backend="autosplit")``, which splits every graph of Dynamo.

    SplittingBackend ──> Compilation ──> DynamoGraph, one for each graph
                             └─ call ──> SplitCall: F, as a node of autograd's graph

The backward of each graph computes the gradients of the graph's inputs. Gradients of parameters are
pending until ``autosplit.backward_weight(model)``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from autosplit.autograd.function import WeightAnchor, run_split
from autosplit.autograd.pending_bound import PendingBound
from autosplit.backends.backend import backend_named
from autosplit.capture.dynamo_graph import (
    GraphCapture,
    capture_graph,
    frozen_parameters,
    refuse_thawed,
    require_runnable,
    skip_mistraced_frames,
    traced_modules,
)
from autosplit.dynamo.pending_weights import ForwardCall, PendingOnParameters
from autosplit.errors import CaptureError, SplitError
from autosplit.passes import Kind, PassError, Role, SplitGraphs
from autosplit.passes.analysis.operator_cost import weight_flops
from autosplit.passes.graph import STATE, outputs, source_line
from autosplit.runtime.accumulation import Accumulation
from autosplit.runtime.build import dump_folder, split_capture
from autosplit.runtime.check import checked
from autosplit.runtime.dtensor_functions import DTensorFunctions
from autosplit.runtime.functions import ForwardResult, SplitFunctions
from autosplit.runtime.input_overlap import OverlapCheck
from autosplit.runtime.options import SplitOptions
from autosplit.runtime.residuals import State, StateRecord
from autosplit.torch_internals.distributed import refuse_sharded
from autosplit.torch_internals.dynamo import input_sources


def input_roles(
    sources: list[str],
    example_inputs: Sequence[Any],
    name_of: Callable[[nn.Parameter], str | None],
) -> list[Role]:
    """The roles of a graph's inputs, with distinct names.

    Parameters that require a gradient have the kind PARAMETER, and all other inputs INPUT.

    Args:
        sources: Dynamo's source of each input, as a Python expression.
        example_inputs: values of the inputs.
        name_of: returns the name of a parameter; None if it is unknown.
    """
    roles: list[Role] = []
    names: set[str] = set()
    for source, value in zip(sources, example_inputs, strict=True):
        trained = isinstance(value, nn.Parameter) and value.requires_grad
        name = (name_of(value) if trained else None) or _readable(source)
        while name in names:
            name += "_"
        names.add(name)
        roles.append(Role(Kind.PARAMETER if trained else Kind.INPUT, name))
    return roles


def _readable(source: str) -> str:
    """A source expression of Dynamo for readers: ``a.weight`` for
    ``L['self']._modules['a']._parameters['weight']``.
    """
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    # After a graph break, Dynamo names the values of the stack ___stack0, ___stack1, ...
    return re.sub(r"^(?:self|___stack\d+)\.", "", re.sub(r"^L\['(\w+)'\]", r"\1", text)) or "input"


class GraphFunctions(SplitFunctions):
    """F, I and W of a graph of Dynamo."""

    capture: GraphCapture
    has_memory_setting = False

    def _run_forward(
        self, state: State, leaves: list[Any], record: StateRecord | None
    ) -> ForwardResult:
        outputs, updates, saved = super()._run_forward(state, leaves, record)
        if self.capture.aliases:
            named = zip(self.output_names, outputs, strict=True)
            outputs = [self.capture.hide_alias(name, value) for name, value in named]
        return ForwardResult(outputs, updates, saved)


class DTensorGraphFunctions(GraphFunctions, DTensorFunctions):
    """F, I and W of a graph of Dynamo with DTensors."""


class DynamoGraph:
    """One compiled graph of a model.

    Attributes:
        parameters: names of the parameters that require a gradient. Modules that share code share
            the graph, and the names are those of the first module.
        functions: F, I and W; None if the graph was not split.
        reason: why the graph was not split; empty if it was split.
        lines: the user's lines that the graph covers, such as ``file.py:3-9``.
    """

    def __init__(self, module: fx.GraphModule, parameters: Sequence[str]) -> None:
        self.parameters = tuple(parameters)
        self.functions: SplitFunctions | None = None
        self.reason = ""
        self.lines = _lines(module.graph)

    @property
    def graphs(self) -> SplitGraphs | None:
        """The split graphs; None if the graph has no backward or was not split."""
        functions = self.functions
        return None if functions is None or not functions.has_backward else functions.graphs

    @property
    def is_split(self) -> bool:
        """Whether the graph has a W."""
        weight = None if self.graphs is None else self.graphs.backward_weight
        return weight is not None and bool(outputs(weight.graph))

    @property
    def state(self) -> str:
        """``split``, or the reason why the graph is not split."""
        if self.is_split or self.reason:
            return self.reason or "split"
        return "no backward" if self.graphs is None else "no parameters"

    @property
    def weight_flops(self) -> tuple[int, int]:
        """FLOPs of weight gradients: (those that W computes, those that I computes)."""
        return (0, 0) if self.graphs is None else weight_flops(self.graphs)


def _lines(graph: fx.Graph) -> str:
    """The user's lines that a graph covers, by file, as text."""
    lines: dict[str, set[int]] = {}
    for node in graph.nodes:
        place = source_line(node).partition(" ")[0]
        path, _, number = place.rpartition(":")
        if path and number.isdigit():
            lines.setdefault(os.path.basename(path), set()).add(int(number))
    return ", ".join(f"{name}:{_span(numbers)}" for name, numbers in lines.items())


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


class GraphOwner(Protocol):
    """Protocol of the object that owns Dynamo's graphs and collects their pending W.

    Attributes:
        anchor: an input of every graph's autograd node. It stands for the parameters, and refers to
            the queue of pending W.
    """

    anchor: WeightAnchor

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The parameter's name in the model; None: graphs name the parameter by Dynamo's
        expression.
        """

    def add_graph(self, part: DynamoGraph) -> None:
        """Record a compiled graph."""

    def enter_graph(self, part: DynamoGraph, parameters: Sequence[Any]) -> ForwardCall:
        """Record a call of a graph.

        Args:
            part: the graph.
            parameters: the parameters whose gradients W computes.

        Returns:
            the forward call of the model that called the graph.
        """


class Compilation:
    """A callable for one graph of Dynamo, split and compiled, or unsplit if it cannot be split.

    Inputs that are ``nn.Parameter`` objects and require a gradient are the graph's parameters.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        owner: GraphOwner,
        options: SplitOptions,
    ) -> None:
        self._frozen = frozen_parameters(example_inputs)
        roles = input_roles(input_sources(module), example_inputs, owner.name_of)
        self._overlap: OverlapCheck | None = None  # an unsplit graph runs as written
        part = DynamoGraph(module, [role.name for role in roles if role.kind is Kind.PARAMETER])
        self._run: Callable[..., Any]
        skip_mistraced_frames(module)
        try:
            part.functions = functions = _functions(module, example_inputs, roles, options)
        except (CaptureError, PassError) as error:
            part.reason = str(error).partition("\n")[0]
            self._run = require_runnable(module)
        else:
            self._run = functions.capture.wrap(SplitCall(functions, part, owner))
            if functions.capture.written:
                names = [role.name for role in roles]
                written, state = functions.capture.written, functions.capture.static
                self._overlap = OverlapCheck(names, example_inputs, written, state)
        owner.add_graph(part)

    def __call__(self, *args: Any) -> Any:
        refuse_thawed(args, self._frozen)
        if self._overlap is not None:
            self._overlap.check(args)
        return self._run(*args)


def _functions(
    module: fx.GraphModule, example_inputs: Sequence[Any], roles: list[Role], options: SplitOptions
) -> GraphFunctions:
    """Split and compile a graph. Call it while Dynamo compiles the graph, because only then are its
    symbolic sizes known.

    Raises:
        CaptureError, PassError: the graph cannot be split.
    """
    backend = backend_named(options.backend, options.mode)
    traced = capture_graph(module, example_inputs, roles, backend.decompositions)
    functions_class = DTensorGraphFunctions if traced.shardings else GraphFunctions
    graphs = split_capture(traced, backend, options, dump_folder(module))
    names = [role.name for role in roles]

    def call_plainly(state: State, leaves: Sequence[Any]) -> Sequence[Any]:
        values = {**dict(zip(traced.inputs, leaves, strict=True)), **state}
        if not values.keys() >= {*names}:
            raise CaptureError("inputs share their memory")
        return [*require_runnable(module)(*map(values.__getitem__, names))]

    accumulation = Accumulation.named(options.accumulation)
    functions = checked(functions_class, call_plainly)(traced, graphs, backend, accumulation)
    functions.backward_graphs.compile_calls()
    return functions


class SplitCall:
    """A split graph as the function that AOTAutograd's wrappers call: runs F as a node of
    autograd's graph.
    """

    _boxed_call = True

    def __init__(self, functions: GraphFunctions, part: DynamoGraph, owner: GraphOwner) -> None:
        self._functions, self._part, self._owner = functions, part, owner
        capture = functions.capture
        graph_inputs = [*enumerate(capture.input_roles)]
        self._state = [(role.name, at) for at, role in graph_inputs if role.kind in STATE]
        self._leaves = [at for at, role in graph_inputs if role.kind not in STATE]
        self._order = [functions.output_names.index(name) for name in capture.results]

    def __call__(self, args: list[Any]) -> list[Any]:
        state = {name: args[at] for name, at in self._state}
        leaves = [args[at] for at in self._leaves]
        args.clear()
        functions, owner = self._functions.for_sizes(leaves), self._owner
        if functions.tangent_specs:
            parameters = [state[name] for name in functions.parameter_names]
            call = owner.enter_graph(self._part, parameters)
            fused, parallel = call.fused_backward, call.in_data_parallel
            outputs = run_split(
                owner.anchor, functions, state, leaves, fused, in_data_parallel=parallel
            )
        else:
            owner.enter_graph(self._part, ())
            with torch.no_grad():
                outputs = functions.run(state, leaves).outputs
        return [outputs[at] for at in self._order]


_OPTIONS = ("backend", "mode", "passes", "max_pending")


class SplittingBackend:
    """A Dynamo backend that splits graphs.

    Args:
        owner: the owner that collects pending work.
        options: options for splitting and running the graphs.
    """

    def __init__(self, owner: GraphOwner, options: SplitOptions) -> None:
        self._owner, self._options = owner, options

    def __deepcopy__(self, _: dict[int, Any]) -> SplittingBackend:
        """Return the backend itself instead of a copy.

        Lightning makes ``torch.compile`` copy its arguments. A copy of the backend would include
        its owner. Copying the owner compiles, which copies the backend again, without end.
        """
        return self

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph for Dynamo.

        Raises:
            ShardedError: FSDP manages a module of the graph.
        """
        for root in traced_modules(module):
            refuse_sharded(root)
        return Compilation(module, example_inputs, self._owner, self._options)


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str = "default",
) -> Callable[..., Any]:
    """The backend that is registered in torch as ``"autosplit"``.

    Args:
        module: the graph.
        example_inputs: the inputs of the graph's first call.
        options: ``{"backend": name, "mode": name, "passes": tuple, "max_pending": number}``, all
            optional: fields of ``autosplit.SplitOptions``, and the limit for pending microbatches
            of each graph, see ``autosplit.split``.

        mode: the mode of ``torch.compile``, which accepts either ``mode`` or ``options``.

    Raises:
        SplitError: an option or a backend is unknown, and the message lists the known ones; or the
            backend has no such mode.
    """
    chosen = {"mode": mode, **(options or {})}
    if unknown := chosen.keys() - set(_OPTIONS):
        names = ", ".join(map(repr, _OPTIONS))
        raise SplitError(f"unknown option {min(unknown)!r}; known options: {names}")
    owner = PendingOnParameters(PendingBound(chosen.pop("max_pending", 1)))
    return SplittingBackend(owner, SplitOptions(**chosen))(module, example_inputs)
