"""``BackwardGraphs``: the compiled I, W and B of one captured module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

from autosplit.backends.backend import Backend
from autosplit.errors import SplitError
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.operator_cost import value_bytes
from autosplit.passes.graph import STATE, calls, inputs, outputs
from autosplit.passes.lowering.accumulate import written
from autosplit.passes.lowering.buffers import private
from autosplit.passes.lowering.forms import GraphForm
from autosplit.passes.manager import When, run_graph_passes, with_graph_passes
from autosplit.passes.subgraph import inline

from .accumulation import Accumulation
from .accumulators import Parts
from .boundary_layout import BoundaryLayout, Constants
from .compiled_graph import GradientGraph, positions
from .sliced_backward import SlicedBackward

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture

_SLICES, _COMPILED_SLICES = 16, 4
_SLICE_BYTES = 2**20


class DeferredLayout(NamedTuple):
    """The arguments of W that I leaves, and static facts about them.

    Attributes:
        roles: roles of W's arguments: deferred values, then state.
        state_positions: positions of W's state in the state that the backward reads.
        layout: static facts about the residuals.
    """

    roles: Sequence[Role]
    state_positions: Sequence[int]
    layout: BoundaryLayout


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardGraphs:
    """I, W and B of one captured module. Each graph is compiled at its first use.

    ::

        tangents, saved, state ──► I ──► deferred, state ──► W
        tangents, saved, state ──► B                            (I and W as one graph)

    Attributes:
        graphs: the FX graphs.
        capture: the captured module.
        arguments: roles of the arguments of I and B: tangents, saved values, state.
        state: roles of the parameters and buffers that the backward reads or writes.
        private_roles: saved values that only these graphs read.
        parameters: maps the name of a call to the names of the parameters whose gradients it
            returns, in order. I comes before W, because it decides the strides of W's arguments.
        backend: compiles the graphs.
        accumulation: how matrix products add gradients.
        graph_class: makes a ``GradientGraph`` from the arguments of that class.
        suffix: appended to the graphs' names for the backend.
        joins: whether W of several microbatches may run as one call.
    """

    graphs: SplitGraphs
    capture: Capture
    arguments: Sequence[Role]
    state: Sequence[Role]
    private_roles: Set[Role]
    parameters: Mapping[str, Sequence[str]]
    backend: Backend
    accumulation: Accumulation
    graph_class: Callable[..., GradientGraph] = GradientGraph
    suffix: str = ""
    joins: bool = True

    def without(self, missing: frozenset[str], graphs: SplitGraphs, suffix: str) -> BackwardGraphs:
        """The backward in which some outputs have no gradient.

        Args:
            missing: paths of these outputs.
            graphs: the FX graphs of that backward.
            suffix: see the attribute.
        """
        tangents = {Role(Kind.TANGENT, name) for name in missing}
        arguments = [role for role in self.arguments if role not in tangents]
        return dataclasses.replace(self, graphs=graphs, arguments=arguments, suffix=suffix)

    @cached_property
    def deferred_layout(self) -> DeferredLayout:
        """The boundary between I and W."""
        weight = self._module("backward_weight")
        graph = self._module("backward_input").graph
        deferred = outputs(graph, Kind.DEFERRED)
        private_roles = private(graph, Kind.DEFERRED, self.private_roles)
        read = state_roles(weight)
        roles = [*(role for role, _ in deferred), *read]
        names = tuple([role.name for role in roles])
        exposed = [at for at, (role, _) in enumerate(deferred) if role not in private_roles]
        constants = Constants.of([weight], self.capture.guards.constant_path)
        live = live_positions(read)
        layout = BoundaryLayout(names, constants, exposed, before_weight=True, live=live)
        return DeferredLayout(roles, positions(read, self.state), layout)

    @cached_property
    def input(self) -> GradientGraph:
        """I: from saved tensors, state and tangents to input gradients, deferred values and
        gradients of early parameters.
        """
        roles, state_positions, _ = self.deferred_layout
        results = [*self._input_grad_roles, *roles[: len(roles) - len(state_positions)]]
        graph = self._graph("backward_input", self.arguments, results)
        if self.backend.compiles:
            graph.follower = self.weight
        return graph

    @cached_property
    def weight(self) -> GradientGraph:
        """W: from deferred values and state to gradients of late parameters."""
        return self._graph("backward_weight", self.deferred_layout.roles)

    @cached_property
    def fused(self) -> GradientGraph:
        """B: from the arguments of I to gradients of inputs and of all parameters."""
        return self._graph("backward", self.arguments, self._input_grad_roles)

    @cached_property
    def sliced(self) -> SlicedBackward:
        """B in slices that complete at least a MiB of weight gradients each."""
        gradients = outputs(self.graphs.joint.graph, Kind.PARAMETER_GRAD)
        size = sum(value_bytes(gradient.meta["val"]) for _, gradient in gradients)
        most = _COMPILED_SLICES if self.backend.compiles else _SLICES
        form = GraphForm("backward", count=max(1, min(most, size // _SLICE_BYTES)))
        program = with_graph_passes(When.WRITING, self.graphs, form)
        modules = run_graph_passes(When.SLICING, program, form)
        return SlicedBackward([*modules.values()], self.backend)

    @cached_property
    def defers_whole_backward(self) -> bool:
        """Whether I computes no operator, so that W is the whole backward.

        True if no input needs a gradient, and either ``Memory.defer_whole_backward`` is set, or the
        chain of derivatives has only one product.
        """
        early = self.parameters["backward_input"]
        return not (early or any(calls(self._module("backward_input").graph)))

    @cached_property
    def completion_order(self) -> list[str]:
        """Names of the parameters, in the order in which I and W complete their gradients."""
        if self.graphs.backward is None:
            return []
        return [*self.input.completion_order(), *self.weight.completion_order()]

    def graph_source(
        self, call: str, dtype: torch.dtype | None = None, *, adds: bool = False, count: int = 1
    ) -> fx.GraphModule:
        """The FX graph of a backward call, as the backend gets it.

        Args:
            call: ``"backward_input"``, ``"backward_weight"`` or ``"backward"``.
            dtype: dtype of the accumulators; None for the dtype of each gradient.
            adds: whether it is the form that adds into accumulators.
            count: the number of microbatches of a joined W.
        """
        return inline(self._graph_of(call).source(dtype, adds=adds, count=count))

    def most_joined(self, dtype: torch.dtype | None = None) -> int:
        """The largest number of microbatches that one W may compute; 1 if joining gains nothing.

        Args:
            dtype: dtype of the accumulators; None for the dtype of each gradient.
        """
        can_join = self.joins and self.graphs.backward is not None
        return self.weight.most_joined(dtype) if can_join else 1

    def compile_calls(
        self,
        calls: Iterable[str] = ("backward_input", "backward_weight"),
        dtype: torch.dtype | None = None,
        *,
        overwrites: bool = False,
        parts: Parts = (),
    ) -> None:
        """Compile the graphs of these calls now, instead of at their first run.

        Args:
            calls: names of methods of ``SplitFunctions`` in the order of a step. The first call
                that computes a parameter's gradient returns a new tensor, and a later call adds to
                it: repeat a name to compile both forms. If ``accumulation`` joins products,
                neighbouring calls of ``"backward_weight"`` run as one. ``"forward"`` is compiled
                already.
            dtype: dtype of the accumulators; None for the dtype of each gradient.
            overwrites: whether the first call writes into accumulators that are not initialized.
            parts: sets of parameters whose completion the last call of a step reports.

        Raises:
            SplitError: an unknown call.
            BackendError: the backend cannot compile a graph.
        """
        order, with_gradient = [*self.parameters], set[str]()
        needed: set[tuple[int, bool, int, Parts]] = set()
        runs = [*self._joined_calls(calls, dtype)]
        for number, (call, count) in enumerate(runs, 1):
            if call not in order:
                names = ", ".join(map(repr, ("forward", *order)))
                raise SplitError(f"unknown call {call!r}; expected one of {names}")
            parameters = self.parameters[call]
            adds = bool(parameters) and with_gradient.issuperset(parameters)
            reported = parts if number == len(runs) else ()
            needed.add((order.index(call), adds, count, reported))
            with_gradient.update(parameters)
        for index, adds, count, reported in sorted(needed) if self.graphs.backward else ():
            self._graph_of(order[index]).compile_form(
                dtype, adds=adds, overwrites=overwrites, count=count, parts=reported
            )

    def _joined_calls(
        self, calls: Iterable[str], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, int]]:
        """Yield (call, number of microbatches that it runs) for each call except ``"forward"``."""
        for call, run in groupby(calls):
            left = len([*run]) if call != "forward" else 0
            most = self.most_joined(dtype) if call == "backward_weight" else 1
            while left:
                yield call, min(left, most)
                left -= min(left, most)

    def _graph_of(self, call: str) -> GradientGraph:
        if call == "backward_input":
            return self.input
        weights = call == "backward_weight" or self.defers_whole_backward
        return self.weight if weights else self.fused

    def _graph(
        self, name: str, arguments: Sequence[Role], results: Sequence[Role] = ()
    ) -> GradientGraph:
        """Create a ``GradientGraph`` from its name, arguments, and results beside gradients of
        parameters.
        """
        return self.graph_class(
            self.graphs,
            name,
            arguments,
            self.parameters[name],
            results,
            suffix=self.suffix,
            backend=self.backend,
            accumulation=self.accumulation,
        )

    @property
    def _input_grad_roles(self) -> list[Role]:
        return [Role(Kind.INPUT_GRAD, name) for name in self.capture.inputs]

    def _module(self, name: str) -> fx.GraphModule:
        module = self.graphs.graphs().get(name)
        if module is None:
            raise SplitError(
                "the module was captured without gradients, so it has no backward: capture it with "
                "an input or a parameter that requires a gradient"
            )
        return module


def state_roles(module: fx.GraphModule) -> list[Role]:
    """Roles of the parameters and buffers that a backward graph reads or writes."""
    return [*dict.fromkeys([*inputs(module.graph, *STATE), *written(module.graph)])]


def live_positions(state: Sequence[Role]) -> frozenset[int]:
    """Positions in ``state`` of the buffers that backward graphs write."""
    return frozenset([at for at, role in enumerate(state) if role.kind is Kind.WRITTEN])
