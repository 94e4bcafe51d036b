"""The callables of one module at one set of input shapes: F, I, W and the fused backward.

The functional core of SplitModule (autograd) and Stage (explicit state). Nothing here keeps
tensors: state comes in, results go out. Positions of values are worked out once; a call only moves
references.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from autosplit.backends.backend import Backend
from autosplit.errors import SplitError
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.operators import may_draw
from autosplit.passes.errors import UnknownSizeError
from autosplit.passes.graph import STATE, calls, concrete, inputs, outputs
from autosplit.passes.lowering.buffers import donatable, donate, lender_roles, private
from autosplit.passes.manager import specialized
from autosplit.passes.subgraph import inline, inlined, inner_calls
from autosplit.runtime.residuals import BoundaryLayout, Constants, Residuals, State, TensorSpec
from autosplit.torch_internals.autograd import without_autocast, write_buffers

from .compiled_graph import GradientGraph, compile_graph, positions, propagate_strides
from .gradient_dependence import GradientDependence, Missing
from .refusals import AutocastGuard

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture


_MAX_SIZES = 1024  # combinations of sizes that are known
_MAX_SPECIALIZED = 3  # sets of outputs without a gradient that have graphs of their own
_SOME = 2


class ForwardResult(NamedTuple):
    """Results of F.

    Attributes:
        outputs: the module's result leaves, then new values of mutated inputs
            (``SplitFunctions.output_names``).
        updates: new values of mutated buffers (``SplitFunctions.updated_state``).
        saved: residuals for the backward.
    """

    outputs: list[Any]
    updates: list[Tensor]
    saved: Residuals


class DeferredLayout(NamedTuple):
    """What I leaves for W.

    Attributes:
        roles: of all of it: what I defers, then state.
        read_at: places of the state among what the backward reads.
        known: what is known of it.
    """

    roles: Sequence[Role]
    read_at: Sequence[int]
    known: BoundaryLayout


class SplitFunctions:
    """F, I, W and B of one traced module; those of the backward are compiled when first used.

    Attributes:
        output_names: paths of the outputs of ``forward``, in order.
        updated_inputs: paths of inputs that the module writes into.
        updated_state: names of buffers that the module writes into.
        forward_state: names of the parameters and buffers that F reads.
        parameter_names: names of all gradients of parameters, in the order in which B returns
            them.
        early_parameters: those that I returns, under a memory setting that lets it.
        late_parameters: those that W returns, in order.
        tangent_specs: output path -> the gradient that the backward expects for it; outputs
            not listed are not differentiable.
        dependence: static facts about the gradients.
        has_backward: whether it was traced with gradients.
        residuals: the class of what one graph leaves for the next.
    """

    residuals = Residuals

    def __init__(self, traced: Capture, graphs: SplitGraphs, backend: Backend) -> None:
        self.capture = traced
        self._graphs = graphs
        self._backend = backend
        self._suffix = ""  # ends the names of graphs for some gradients only
        self._size: Callable[[Any], int] = concrete
        self._key: tuple[int, ...] = ()  # of these sizes
        self._resized: dict[tuple[int, ...], SplitFunctions] = {}
        self._specialized: dict[frozenset[str], SplitFunctions | None] = {}
        saved = self._compile_forward()
        self.tangent_specs = self._tangent_specs()
        self._tangents = [(n, self.output_names.index(n)) for n in self.tangent_specs]
        self.dependence = GradientDependence(graphs, traced.inputs, self._tangents)
        self.parameter_names = _parameters(graphs.joint)
        early = {*_parameters(graphs.backward_input)}
        self.early_parameters = [name for name in self.parameter_names if name in early]
        self.late_parameters = [name for name in self.parameter_names if name not in early]
        backward = graphs.backward
        self.has_backward = backward is not None
        # Parameters and buffers that the backward reads.
        self._read = [] if backward is None else [*inputs(backward.graph, *STATE)]
        self._taken = [*(Role(Kind.TANGENT, name) for name in self.tangent_specs), *saved]
        self._taken += self._read
        self._read_state = [role.name for role in self._read]
        self._saves = BoundaryLayout(
            tuple([role.name for role in (*saved, *self._read)]),
            self._constants_of([] if backward is None else [backward]),
            self._exposed,
            self._donated,
        )

    def _compile_forward(self) -> list[Role]:
        """Compile F, and tell the backward how what it saves lies in memory. Returns the roles of
        that.
        """
        graphs, backend, taken = self._graphs, self._backend, self.capture.inputs
        compiled = compile_graph("forward", graphs.forward, backend)
        takers = graphs.backward, graphs.backward_input
        propagate_strides(compiled.strides, *takers)
        # What the backward may write over.
        donated = donatable(graphs.forward.graph) if backend.compiles else set()
        donate(donated, *takers)
        by_kind = {kind: [r for r in compiled.outputs if r.kind is kind] for kind in Kind}
        updated, saved = by_kind[Kind.UPDATE], by_kind[Kind.SAVED]
        inside = [role for role in updated if role.name not in taken]
        results = [*by_kind[Kind.OUTPUT], *(role for role in updated if role.name in taken)]
        self.updated_inputs = [role.name for role in updated if role.name in taken]
        self.updated_state = [role.name for role in inside]
        self.output_names = [role.name for role in results]
        self._own = private(graphs.forward.graph, Kind.SAVED)
        self._exposed = [at for at, role in enumerate(saved) if role not in self._own]
        self._donated = [at for at, role in enumerate(saved) if role in donated]
        read = [role for role in compiled.inputs if role.kind in STATE]
        self.forward_state = [role.name for role in read]
        given = [*read, *(Role(Kind.INPUT, name) for name in taken)]
        self._forward = compiled.taking(given, [*results, *inside, *saved])
        return saved

    @property
    def calling(self) -> SplitGraphs:
        """The graphs that are run, which may call graphs of blocks."""
        return self._graphs

    @cached_property
    def graphs(self) -> SplitGraphs:
        """The graphs with all their operators; those that are run may call graphs of blocks."""
        return inlined(self._graphs)

    def at(self, leaves: Sequence[Any]) -> SplitFunctions:
        """The same graphs, for a call with other sizes of inputs; one object for each combination.

        Args:
            leaves: of the call; the guards hold for it.
        """
        sizes = self.capture.sizes
        if sizes is None:
            return self
        key = sizes.key(leaves)
        return self._resized.get(key) or self._twin(key, sizes.value(leaves))

    def _twin(self, key: tuple[int, ...], size: Callable[[Any], int]) -> SplitFunctions:
        """The same graphs for other sizes."""
        if len(self._resized) >= _MAX_SIZES:
            self._resized.clear()
        twin = self._resized[key] = copy.copy(self)
        twin._key, twin._size = key, size
        twin._resized = {}  # a shared one would hold itself
        twin.__dict__.pop("output_specs", None)
        twin.tangent_specs = twin._tangent_specs()
        return twin

    def for_gradients(self, output_grads: Sequence[object]) -> tuple[SplitFunctions, Missing]:
        """The callables of a backward in which only these gradients arrive, None for the others;
        and what gets no gradient in it.

        Graphs of their own are made for the first few sets of missing gradients. For further ones,
        and where such a graph cannot be made, missing gradients are zeros.
        """
        missing = self.dependence.missing(output_grads)
        if not missing.outputs:
            return self, missing
        variants = self._specialized
        if missing.outputs not in variants and len(variants) < _MAX_SPECIALIZED:
            variants[missing.outputs] = self._without(missing.outputs)
        functions = variants.get(missing.outputs) or self
        if functions._key != self._key:
            key = self._key
            functions = functions._resized.get(key) or functions._twin(key, self._size)
        return functions, missing

    def _without(self, missing: frozenset[str]) -> SplitFunctions | None:
        """The callables of a backward in which these outputs get no gradient; None if their graphs
        need zeros of an unknown size.
        """
        try:
            graphs = specialized(self._graphs, missing)
        except UnknownSizeError:
            return None
        variant = copy.copy(self)
        for name in [*vars(variant)]:
            if isinstance(getattr(type(self), name, None), cached_property):
                del vars(variant)[name]
        variant._graphs, variant._resized, variant._specialized = graphs, {}, {}
        variant.dependence = GradientDependence(graphs, self.capture.inputs, self._tangents)
        variant._tangents = [(name, at) for name, at in self._tangents if name not in missing]
        gone = {Role(Kind.TANGENT, name) for name in missing}
        variant._taken = [role for role in self._taken if role not in gone]
        variant._suffix = f"_without_{len(self._specialized) + 1}"
        # Before it is copied for other sizes, which share them.
        variant._input, variant._weight, variant._fused  # noqa: B018
        return variant

    @property
    def specialized(self) -> Sequence[frozenset[str]]:
        """Sets of outputs without a gradient for which there are I, W and B of their own."""
        return [missing for missing, functions in self._specialized.items() if functions]

    def _tangent_specs(self) -> dict[str, TensorSpec]:
        tangents = inputs(self._graphs.joint.graph, Kind.TANGENT)
        return self._specs({role.name: node.meta["val"] for role, node in tangents.items()})

    def _specs(self, traced: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """Specs of traced tensors with the sizes that they have in a call."""
        return {name: TensorSpec.of(value).at(self._size) for name, value in traced.items()}

    @staticmethod
    def sentinel_parameters(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters that a split graph has edges to in autograd's graph though it gives them
        no gradients, so that a backward that asks for them is noticed: each costs the engine a
        visit.
        """
        if len(parameters) <= 2 * _SOME:
            return parameters
        return [*parameters[:_SOME], *parameters[-_SOME:]]

    @cached_property
    def autocast_guard(self) -> AutocastGuard:
        """Checks autocast before a backward that comes from autograd."""
        return AutocastGuard(self._graphs.backward or self._graphs.joint)

    @cached_property
    def draws(self) -> bool:
        """Whether the graphs may draw random numbers; those of the backward do in custom operators
        only.
        """
        return any(map(may_draw, inner_calls(self._graphs.joint.graph)))

    @property
    def generated(self) -> Mapping[str, str]:
        """Name of a graph -> source that the backend generated, of the graphs compiled so far."""
        return self._backend.generated

    def compile(
        self,
        calls: Iterable[str] = ("backward_input", "backward_weight"),
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compile the graphs of these calls ahead of their first run.

        Args:
            calls: names of methods, in the order of one step: the first of a kind makes
                gradients, later ones add to them.
            dtype: of what they add into; None where each has its gradient's own.

        Raises:
            SplitError: an unknown call.
            BackendError: the backend cannot compile a graph.
        """
        makes = {  # I before W: it decides how what W gets lies in memory
            "backward_input": self.early_parameters,
            "backward_weight": self.late_parameters,
            "backward": self.parameter_names,
        }
        order, made = [*makes], set[str]()
        needed: set[tuple[int, bool]] = set()
        for call in calls:
            if call not in makes:
                known = ", ".join(map(repr, makes))
                raise SplitError(f"unknown call {call!r}; known ones: {known}")
            needed.add((order.index(call), bool(makes[call]) and made.issuperset(makes[call])))
            made.update(makes[call])
        for place, adds in sorted(needed) if self.has_backward else ():
            self._graph_of(order[place]).compile(dtype, adds=adds)

    def source(
        self, call: str, dtype: torch.dtype | None = None, *, adds: bool = False
    ) -> fx.GraphModule:
        """The graph behind a call, as it is given to the backend.

        Args:
            call: the name of a method.
            dtype: of what it adds into; None where each has its gradient's own.
            adds: whether it adds into gradients that are there.
        """
        if call == "forward":
            return self.graphs.forward
        return inline(self._graph_of(call).source(dtype, adds=adds))

    def _graph_of(self, call: str) -> GradientGraph:
        if call == "backward_input":
            return self._input
        weights = call == "backward_weight" or self._defers_whole_backward
        return self._weight if weights else self._fused

    @cached_property
    def _deferred_layout(self) -> DeferredLayout:
        weight = self._module("backward_weight")
        graph = self._module("backward_input").graph
        deferred, own = outputs(graph, Kind.DEFERRED), private(graph, Kind.DEFERRED, self._own)
        read = [*inputs(weight.graph, *STATE)]
        roles = [*(role for role, _ in deferred), *read]
        names = tuple([role.name for role in roles])
        exposed = [at for at, (role, _) in enumerate(deferred) if role not in own]
        known = BoundaryLayout(names, self._constants_of([weight]), exposed, before_weight=True)
        return DeferredLayout(roles, positions(read, self._read), known)

    @cached_property
    def _input(self) -> GradientGraph:
        """I: takes tangents, what F saved, and the state that the backward reads; its other results
        are gradients of the module's inputs and then what is deferred.
        """
        deferred = self._deferred_layout.roles[
            : len(self._deferred_layout.roles) - len(self._deferred_layout.read_at)
        ]
        others, late = [*self._wanted, *deferred], self._module("backward_weight")
        return self._graph("backward_input", self._taken, self.early_parameters, others, [late])

    @cached_property
    def _defers_whole_backward(self) -> bool:
        """Whether I only passes on what it takes, so that W is the whole backward: no input needs a
        gradient, and either nobody waits for I, see ``Memory``, or there is but one product with
        data.
        """
        return not (self.early_parameters or any(calls(self._module("backward_input").graph)))

    @cached_property
    def _weight(self) -> GradientGraph:
        """W."""
        return self._graph("backward_weight", self._deferred_layout.roles, self.late_parameters)

    @cached_property
    def _fused(self) -> GradientGraph:
        """B: takes the arguments of I; its other results are gradients of the module's inputs."""
        return self._graph("backward", self._taken, self.parameter_names, self._wanted)

    def _graph(
        self,
        name: str,
        given: Sequence[Role],
        parameters: Sequence[str],
        others: Sequence[Role] = (),
        takers: Sequence[fx.GraphModule] = (),
    ) -> GradientGraph:
        module, backend = self._module(name), self._backend
        return GradientGraph(
            name + self._suffix, module, given, parameters, others, takers, backend=backend
        )

    @property
    def _wanted(self) -> list[Role]:
        return [Role(Kind.INPUT_GRAD, name) for name in self.capture.inputs]

    def _constants_of(self, modules: Iterable[fx.GraphModule]) -> Constants:
        return Constants.of(modules, self.capture.guards.name_of)

    def _module(self, name: str) -> fx.GraphModule:
        module = self._graphs.graphs().get(name)
        if module is None:
            raise SplitError("this module was traced without gradients; it has no backward")
        return module

    @cached_property
    def forward_constants(self) -> Constants:
        """The constants that F reads."""
        return self._constants_of([self._graphs.forward])

    @cached_property
    def output_specs(self) -> dict[str, TensorSpec]:
        """Output path -> spec, for outputs that are tensors."""
        pairs = outputs(self._graphs.forward.graph, Kind.OUTPUT, Kind.UPDATE)
        values = {role.name: getattr(value, "meta", {}).get("val") for role, value in pairs}
        return self._specs({name: v for name, v in values.items() if isinstance(v, Tensor)})

    @cached_property
    def caller_memory(self) -> list[tuple[int, int | None]]:
        """Places of deferred tensors in the caller's memory, each with the place of the input that
        it lies in, or None for one in an incoming gradient.
        """
        lenders = lender_roles(self._graphs)
        if not lenders:
            return []
        places = {name: at for at, name in enumerate(self.capture.inputs)}
        roles = enumerate(self._deferred_layout.roles)
        found = [(at, lenders[role]) for at, role in roles if role in lenders]
        return [(at, places.get(r.name) if r.kind is Kind.INPUT else None) for at, r in found]

    @cached_property
    def visible_deferred(self) -> list[int]:
        """Places of deferred tensors that lie in outputs, or in gradients that come or go."""
        inputs = {at for at, place in self.caller_memory if place is not None}
        return [at for at in self._deferred_layout.known.exposed if at not in inputs]

    @cached_property
    def borrowed(self) -> list[bool]:
        """For each of ``parameter_names`` whether its gradient is not a tensor of its own."""
        return [name in self.dependence.borrowed for name in self.parameter_names]

    @cached_property
    def constant_outputs(self) -> list[int]:
        """Places of outputs that are not differentiable."""
        names = enumerate(self.output_names)
        return [at for at, name in names if name not in self.tangent_specs]

    def run(self, state: State, leaves: list[Any]) -> ForwardResult:
        """F on this state, whose buffers get their new values. ``leaves``: as for ``forward``."""
        with without_autocast():
            result = self.forward(state, leaves)
        if self.updated_state:
            write_buffers([state[name] for name in self.updated_state], result.updates)
        return result

    def forward(self, state: State, leaves: list[Any]) -> ForwardResult:
        """F. ``leaves``: flattened ``(args, kwargs)``; emptied."""
        read = [*map(state.__getitem__, self._read_state)]
        pool = [*map(state.__getitem__, self.forward_state), *leaves]
        leaves.clear()
        results = self._forward(pool)
        outputs = len(self.output_names)
        end = outputs + len(self.updated_state)
        saved = self.residuals(self._saves, results[end:], tuple(read))
        return ForwardResult(results[:outputs], results[outputs:end], saved)

    def backward_input(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Residuals, Sequence[Tensor]]:
        """I.

        Args:
            saved: residuals of F; taken.
            output_grads: in the order of ``output_names``; emptied.
            gradients: what to add the gradients of ``early_parameters`` into.
            dtype: of ``gradients``; None where each has its gradient's own.

        Returns:
            Gradients in the order of ``capture.inputs``, None where there is none; residuals
            for W; and the gradients of ``early_parameters``, as from ``backward_weight``.

        Raises:
            SplitError: a gradient does not fit its output, or a saved tensor was written
                in place since the forward.
        """
        read, (_, read_at, known) = saved.state, self._deferred_layout
        pool = self._backward_pool(saved.take(), output_grads)
        results, early = self._input.run(pool, gradients, dtype)
        count = len(self.capture.inputs)
        deferred = self.residuals(known, results[count:], tuple([read[at] for at in read_at]))
        return results[:count], deferred, early

    def backward_weight(
        self,
        deferred: Residuals,
        gradients: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        """W.

        Args:
            deferred: residuals of I; taken.
            gradients: what to add into, in the order of ``late_parameters``; none of them may
                share storage with another or with anything else that is handed over.
            dtype: of ``gradients``; None where each has its gradient's own.

        Returns:
            ``gradients``; without them new tensors in that order, of which those named by
            ``dependence.borrowed`` may share storage.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        return self._weight.run(deferred.take(), gradients, dtype)[1]

    def backward(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """B, unsplit: I and W in one call. Arguments and results are theirs.

        Raises:
            SplitError: as ``backward_input``.
        """
        if self._defers_whole_backward:
            grads, deferred, _ = self.backward_input(saved, output_grads)
            return grads, self.backward_weight(deferred, gradients, dtype)
        pool = self._backward_pool(saved.take(), output_grads)
        return self._fused.run(pool, gradients, dtype)

    def _backward_pool(self, saved: list[Tensor], output_grads: list[Tensor | None]) -> list[Any]:
        """Arguments of I or B in the only list that refers to them, so that they can die inside."""
        pool: list[Any] = []
        for name, at in self._tangents:
            grad, spec = output_grads[at], self.tangent_specs[name]
            if (
                grad is None
                or grad.dtype is not spec.dtype
                or (grad.shape, grad.stride()) != (spec.shape, spec.stride)
            ):
                grad = self._tangent(name, grad)
            pool.append(grad)
        output_grads.clear()
        pool += saved
        saved.clear()
        return pool

    def _tangent(self, name: str, grad: Tensor | None) -> Tensor:
        """The gradient as the graph was traced with it: its dtype and strides, never None."""
        spec = self.tangent_specs[name]
        if grad is None:
            return spec.zeros()
        if grad.shape != spec.shape or grad.dtype != spec.dtype:
            raise SplitError(
                f"the gradient of {name} must be {spec.dtype} {list(spec.shape)}, "
                f"got {grad.dtype} {list(grad.shape)}"
            )
        return spec.conform(grad)


def _parameters(module: fx.GraphModule | None) -> list[str]:
    """Parameters whose gradients a graph returns."""
    if module is None:
        return []
    return [role.name for role, _ in outputs(module.graph, Kind.PARAMETER_GRAD)]
