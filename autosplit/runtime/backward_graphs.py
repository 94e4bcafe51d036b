"""The graphs of one module's backward: I, W in all ways of running it, and B unsplit.

Here is what takes what, and in which order; ``functions`` moves the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, fx

from autosplit.backends.compiled_graph import Backend, hand_over, positions
from autosplit.errors import SplitError
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import fixed, outputs, role_of
from autosplit.passes.lowering.concatenate_microbatches import (
    concatenate_microbatches,
    microbatch_role,
)
from autosplit.passes.subgraph import inline
from autosplit.passes.verify import verify_graph
from autosplit.runtime.activations.saved_tensors import Constants

from .gradient_accumulation import Accumulation
from .gradient_dependence import GradientDependence
from .gradient_graphs import Call, CalledVariant, GradientGraph, PassThrough, variants
from .weight_slices import SlicedWeight

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture


class BackwardInput(NamedTuple):
    """I, and the positions of its results.

    Attributes:
        graph: takes tangents, what F saved, and the state that the backward reads; its other
            results are gradients of the module's inputs and then what is deferred.
        inputs: how many inputs the module has.
        handed: roles of what W gets: what I defers, then state.
        names: theirs.
        read_at: places of what W reads among what the backward reads.
        loose: how many of that, the last, are targets.
        constants: those that W reads.
    """

    graph: GradientGraph | PassThrough
    inputs: int
    handed: Sequence[Role]
    names: tuple[str, ...]
    read_at: Sequence[int]
    loose: int
    constants: Constants


class BackwardGraphs:
    """I, W and B of one traced module, each compiled when it is first used.

    Where I has nothing to compute (no input needs a gradient, and either nobody waits for I, see
    ``passes.memory``, or there is but one product with data), it passes on what it takes without
    running a graph, and W and B are one and the same graph.

    Args:
        traced: the module.
        graphs: what it was split into.
        saved: roles of what F saves, in its order.
        tangents: outputs whose gradients the backward takes, in order.
        dependence: what is known of the gradients.
        backend: how graphs are compiled.

    Attributes:
        read: roles of the parameters and buffers that the backward reads, then of its targets.
        constants: those that the backward reads.
        parameter_names: whose gradients B returns, in order.
        early_parameters: whose gradients I returns, in order.
        late_parameters: whose gradients W returns, in order.
    """

    def __init__(
        self,
        traced: Capture,
        graphs: SplitGraphs,
        *,
        saved: Sequence[Role],
        tangents: Iterable[str],
        dependence: GradientDependence,
        backend: Backend,
    ) -> None:
        self._name_of = traced.guards.name_of
        self._graphs = graphs
        self._dependence = dependence
        self._backend = backend
        self._slices: dict[int, SlicedWeight] = {}
        self._together: dict[int, GradientGraph] = {}
        backward = graphs.backward
        self.read = [] if backward is None else fixed(backward.graph)
        self.constants = self._constants_of([] if backward is None else [backward])
        self._crossing = [*(Role(Kind.TANGENT, name) for name in tangents), *saved]
        self._taken = [*self._crossing, *self.read]
        self._wanted = [Role(Kind.INPUT_GRAD, name) for name in traced.inputs]
        self.parameter_names = _parameters(graphs.joint)
        early = {*_parameters(graphs.backward_input)}
        self.early_parameters = [name for name in self.parameter_names if name in early]
        self.late_parameters = [name for name in self.parameter_names if name not in early]

    def compile(self, calls: Iterable[Call], accumulation: Accumulation, slices: int) -> None:
        """Compile the graphs of some calls; arguments are those of ``SplitFunctions.compile``."""
        makes = {
            "backward_input": self.early_parameters,
            "backward_weight": self.late_parameters,
            "backward": self.parameter_names,
        }
        needed = variants(calls, makes)
        if self._graphs.backward is None:
            return
        order = [*makes]  # I before W: it decides how what W gets lies in memory
        for variant in sorted(needed, key=lambda each: (order.index(each.call), *each[1:])):
            self._graph_of(variant, slices).compile(accumulation if variant.adds else None)

    def source(self, variant: CalledVariant, accumulation: Accumulation) -> fx.GraphModule:
        """The graph behind a call with all its operators, W whole."""
        found = self._graph_of(variant, slices=1)
        if isinstance(found, GradientGraph):
            return inline(found.source(accumulation if variant.adds else None))
        return self._module("backward_input")  # it returns its arguments

    def _graph_of(
        self, variant: CalledVariant, slices: int
    ) -> GradientGraph | SlicedWeight | PassThrough:
        match variant.call:
            case "backward_input":
                return self.backward_input.graph
            case "backward_weight" if variant.microbatches > 1 and not self.weight_writes:
                return self.together(variant.microbatches)
            case "backward_weight":
                return self.weight if slices == 1 else self.sliced(slices)
        return self.unsplit

    @cached_property
    def backward_input(self) -> BackwardInput:
        """I."""
        module = self._module("backward_input")
        weight = self._module("backward_weight")
        if self._only_weights:
            return self._passed_on(module, weight)
        deferred = [role for role, _ in outputs(module.graph, Kind.DEFERRED)]
        read = fixed(weight.graph)
        others = [*self._wanted, *deferred]
        return BackwardInput(
            GradientGraph(
                "backward_input",
                module,
                self._taken,
                parameters=self.early_parameters,
                others=others,
                takers=[weight],
                backend=self._backend,
            ),
            len(self._wanted),
            (*deferred, *read),
            tuple([role.name for role in (*deferred, *read)]),
            positions(read, self.read),
            self.weight_writes,
            self._constants_of([weight]),
        )

    def _passed_on(self, module: fx.GraphModule, weight: fx.GraphModule) -> BackwardInput:
        """I as a pass-through."""
        values = {role: node.meta["val"] for role, node in outputs(module.graph, Kind.DEFERRED)}
        hand_over({r: v.stride() for r, v in values.items() if isinstance(v, Tensor)}, weight)
        passed = _passed(module.graph)
        handed = (*(passed[role] for role in self._crossing), *self.read)
        return BackwardInput(
            PassThrough(len(self._wanted), len(self._crossing)),
            len(self._wanted),
            handed,
            tuple([role.name for role in handed]),
            range(len(self.read)),
            self.weight_writes,
            self._constants_of([weight]),
        )

    @cached_property
    def _only_weights(self) -> bool:
        """Whether I computes nothing, so that W and B are one graph."""
        graph, weight = self._module("backward_input").graph, self._module("backward_weight").graph
        return _passed(graph).keys() == set(self._crossing) and fixed(weight) == self.read

    @cached_property
    def weight_writes(self) -> int:
        """How many targets W has."""
        return len(outputs(self._module("backward_weight").graph, Kind.WRITE))

    @cached_property
    def weight(self) -> GradientGraph:
        """W of one microbatch, in one call."""
        module = self._module("backward_weight")
        others = self._wanted if self._only_weights else ()  # it is B too
        return GradientGraph(
            "backward_weight",
            module,
            self.backward_input.handed,
            parameters=self.late_parameters,
            others=others,
            backend=self._backend,
        )

    def together(self, count: int) -> GradientGraph:
        """W of several microbatches in one call; takes the residuals of each, one after another."""
        if count not in self._together:
            self.backward_input.graph.compile()  # decides how what W gets lies in memory
            handed = self.backward_input.handed
            module = concatenate_microbatches(inline(self._module("backward_weight")), count)
            verify_graph("backward_weight", module, "batch")
            given = [microbatch_role(role, index) for index in range(count) for role in handed]
            self._together[count] = GradientGraph(
                "backward_weight",
                module,
                given,
                parameters=self.late_parameters,
                backend=self._backend,
            )
        return self._together[count]

    def sliced(self, count: int) -> SlicedWeight:
        """W in slices; the same object for the same count.

        Raises:
            SplitError: W cannot be cut into so many.
        """
        if count not in self._slices:
            self.backward_input.graph.compile()  # decides how what the slices get lies in memory
            self._slices[count] = SlicedWeight(
                inline(self._module("backward_weight")),
                self.backward_input.handed,
                count,
                borrowed=self._dependence.borrowed,
                constants_of=self._constants_of,
                backend=self._backend,
            )
        return self._slices[count]

    @cached_property
    def unsplit(self) -> GradientGraph:
        """B: takes the arguments of I; its other results are gradients of the module's inputs."""
        if self._only_weights:
            return self.weight
        module = self._module("backward")
        return GradientGraph(
            "backward",
            module,
            self._taken,
            parameters=self.parameter_names,
            others=self._wanted,
            backend=self._backend,
        )

    def _constants_of(self, modules: Iterable[fx.GraphModule]) -> Constants:
        return Constants.of(modules, self._name_of)

    def _module(self, name: str) -> fx.GraphModule:
        module = self._graphs.graphs().get(name)
        if module is None:
            raise SplitError("this module was traced without gradients; it has no backward")
        return module


def _passed(graph: fx.Graph) -> dict[Role, Role]:
    """Arguments of I -> deferred results, where I is the identity; else nothing."""
    pairs = [(role, value) for role, value in outputs(graph) if isinstance(value, fx.Node)]
    if any(value.op != "placeholder" or role.kind is not Kind.DEFERRED for role, value in pairs):
        return {}
    return {role_of(value): role for role, value in pairs}


def _parameters(module: fx.GraphModule | None) -> list[str]:
    """Parameters whose gradients a graph returns."""
    if module is None:
        return []
    return [role.name for role, _ in outputs(module.graph, Kind.PARAMETER_GRAD)]
