"""``SplitFunctions``: F, I, W and B of one captured module as functions of tensors.

``SplitModule`` calls them under autograd, ``Stage`` with explicit state. The functions keep no
tensors. Positions of arguments and results are computed once; a call only moves references.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sympy import Integer
from torch import Tensor, fx

from autosplit.backends.backend import Backend
from autosplit.errors import CaptureError, SplitError
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.operator_cost import flops
from autosplit.passes.analysis.operators import may_draw
from autosplit.passes.errors import UnknownSizeError
from autosplit.passes.graph import STATE, concrete, inputs, outputs
from autosplit.passes.lowering.accumulate import written
from autosplit.passes.lowering.buffers import donatable, lender_roles, private
from autosplit.passes.lowering.forms import GraphForm
from autosplit.passes.manager import When, run_graph_passes, with_graph_passes
from autosplit.passes.subgraph import inlined, inner_calls, sizes_of_calls
from autosplit.runtime.boundary_layout import BoundaryLayout, Constants
from autosplit.runtime.call_cache import CallCache
from autosplit.runtime.residuals import Residuals, State, own_writes
from autosplit.runtime.tensor_spec import TensorSpec
from autosplit.torch_internals.autograd import is_autocast, without_autocast
from autosplit.torch_internals.gradients import write_buffers

from .accumulation import ACCUMULATION, Accumulation
from .backward_graphs import BackwardGraphs, live_positions, state_roles
from .compiled_graph import Accumulators, GradientGraph, compile_graph
from .gradient_dependence import NONE_MISSING, GradientDependence, Missing
from .input_overlap import refuse_state_overlap
from .refusals import AutocastGuard

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture
    from autosplit.capture.size_rule import SizeRule


_MAX_SPECIALIZED = 3  # sets of outputs without a gradient that get their own graphs
_SENTINELS_PER_END = 2


class ForwardResult(NamedTuple):
    """Results of F.

    Attributes:
        outputs: leaves of the module's result, then new values of inputs that the module writes
            into, in the order of ``SplitFunctions.output_names``.
        updates: new values of buffers that the module writes into, in the order of
            ``SplitFunctions.updated_state``.
        saved: residuals for the backward.
    """

    outputs: list[Any]
    updates: list[Tensor]
    saved: Residuals


class SplitFunctions:
    """F, I, W and B of one captured module. Backward graphs are compiled at their first use.

    ::

        outputs, updates, saved = functions.forward(state, leaves)                    # F
        input_grads, deferred, early = functions.backward_input(saved, output_grads)  # I
        late = functions.backward_weight(deferred)                                    # W
        input_grads, weight_grads = functions.backward(saved, output_grads)           # B = I, W

    Contract:
        - F, I and W are functions: they keep no tensors, and write only into the accumulators that
          they get and, in ``run``, into buffers.
        - Arguments are consumed: the lists ``leaves`` and ``output_grads`` are emptied, and the
          graph takes the values of ``saved`` and ``deferred``. Each value is freed at its last use
          inside a graph.
        - I returns the gradients of all inputs and of ``early_parameters``; W returns those of
          ``late_parameters``. Both together are ``parameter_names``, for all of which B returns
          gradients.
        - A call must fulfil the guards of ``capture``, which ``Specializations`` checks.
          ``for_sizes`` returns the functions for the sizes of a call.

    Terms:
        state: the module's parameters and buffers by name.
        leaves: the flattened ``(args, kwargs)`` of a call.
        tangent: the gradient of an output, an argument of the backward.
        residuals: the values that one graph leaves for the next, see ``Residuals``.
        early, late parameters: parameters whose gradients I, or W, computes.

    Shapes:
        Leaves have the shapes, strides and dtypes of the capture. An output's gradient has the
        shape and dtype of ``tangent_specs``; other strides are copied. Gradients have the shape
        and dtype of their input or parameter.

    Raises:
        SplitError: from the backward calls, if a gradient does not fit its output, if a residual
            was written in place, or if the module was captured without gradients.

    Attributes:
        output_names: paths of the outputs of ``forward``, in order.
        updated_inputs: paths of inputs that the module writes into.
        updated_state: names of buffers that the module writes into.
        forward_state: names of the parameters and buffers that F reads.
        parameter_names: names of parameters that get a gradient, in the order in which B returns
            them.
        early_parameters: names of parameters whose gradients I returns, in order; none unless the
            memory setting allows it.
        late_parameters: names of parameters whose gradients W returns, in order.
        tangent_specs: maps the path of an output to the spec of the gradient that the backward
            expects; outputs without an entry are not differentiable.
        dependence: on which outputs each gradient depends, and other static facts about gradients.
        has_backward: whether the module was captured with gradients.
        residuals: the class of the residuals, such as ``Residuals``.
        joins: whether W of several microbatches may run as one call.
    """

    residuals = Residuals
    joins = True

    def __init__(
        self,
        traced: Capture,
        graphs: SplitGraphs,
        backend: Backend,
        accumulation: Accumulation = ACCUMULATION["exact"],
    ) -> None:
        self.capture = traced
        self._graphs = graphs
        self._backend = backend
        self._accumulation = accumulation
        self._size: Callable[[Any], int] = concrete
        self._key: tuple[int, ...] = ()  # the open sizes
        self._resized = CallCache[tuple[int, ...], SplitFunctions]()
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
        state = [] if backward is None else state_roles(backward)
        tangents = [Role(Kind.TANGENT, name) for name in self.tangent_specs]
        self.backward_graphs = BackwardGraphs(
            graphs,
            traced,
            [*tangents, *saved, *state],
            state,
            self._private_roles,
            {
                "backward_input": self.early_parameters,
                "backward_weight": self.late_parameters,
                "backward": self.parameter_names,
            },
            backend,
            accumulation,
            self._graph_class,
            joins=self.joins,
        )
        self._read_state = [role.name for role in state]
        self._saves = BoundaryLayout(
            tuple([role.name for role in (*saved, *state)]),
            self._constants_of([] if backward is None else [backward]),
            self._exposed,
            self._donated,
            live=live_positions(state),
        )

    def _compile_forward(self) -> list[Role]:
        """Compile F, and return the roles of saved tensors."""
        graphs, backend, leaf_names = self._graphs, self._backend, self.capture.inputs
        compiled = compile_graph("forward", graphs.forward, backend)
        # Saved tensors that the backward may overwrite.
        donated = frozenset(donatable(graphs.forward.graph) if backend.compiles else ())
        form = GraphForm("forward", strides=compiled.strides, donated=donated)
        run_graph_passes(When.COMPILED, graphs, form)
        by_kind = {kind: [r for r in compiled.outputs if r.kind is kind] for kind in Kind}
        updated, saved = by_kind[Kind.UPDATE], by_kind[Kind.SAVED]
        buffers = [role for role in updated if role.name not in leaf_names]
        results = [*by_kind[Kind.OUTPUT], *(role for role in updated if role.name in leaf_names)]
        self.updated_inputs = [role.name for role in updated if role.name in leaf_names]
        self.updated_state = [role.name for role in buffers]
        self.output_names = [role.name for role in results]
        self._private_roles = private(graphs.forward.graph, Kind.SAVED)
        self._exposed = [at for at, role in enumerate(saved) if role not in self._private_roles]
        self._donated = [at for at, role in enumerate(saved) if role in donated]
        read = [role for role in compiled.inputs if role.kind in STATE]
        self.forward_state = [role.name for role in read]
        arguments = [*read, *(Role(Kind.INPUT, name) for name in leaf_names)]
        self._forward = compiled.with_order(arguments, [*results, *buffers, *saved])
        return saved

    @property
    def calling(self) -> SplitGraphs:
        """The FX graphs that run; they may call graphs of repeated blocks."""
        return self._graphs

    @cached_property
    def graphs(self) -> SplitGraphs:
        """The FX graphs with the graphs of repeated blocks inlined."""
        return inlined(self._graphs)

    def for_sizes(self, leaves: Sequence[Any]) -> SplitFunctions:
        """The functions for a call's input sizes; one object for each combination of sizes.

        Args:
            leaves: the inputs of the call, which must fulfil the guards.
        """
        sizes = self.capture.sizes
        if sizes is None:
            return self
        key = sizes.size_key(leaves)
        return self._resized.get(key) or self._twin(key, sizes.value(leaves))

    def _twin(self, key: tuple[int, ...], size: Callable[[Any], int]) -> SplitFunctions:
        """Create the functions of the same graphs for other sizes."""
        twin = self._resized.remember(key, copy.copy(self))
        twin._key, twin._size = key, size
        twin._resized = CallCache()  # a shared dictionary would contain the twin itself
        twin.__dict__.pop("specs_by_path", None)
        twin.__dict__.pop("flops", None)
        twin.__dict__.pop("_sizes_of_blocks", None)
        twin.tangent_specs = twin._tangent_specs()
        return twin

    def size(self, size: Any) -> int:
        """The number for a symbolic size of the graphs, at the sizes of these functions. A size in
        a block has its largest number over all calls of the block. A size that depends on data has
        an estimate.
        """
        try:
            return self._size(size)
        except CaptureError:
            env = size.node.shape_env
            in_block = env.replace(size.node.expr)
            numbers = [in_block.xreplace(values) for values in self._sizes_of_blocks[env]]
            integers = [int(number) for number in numbers if not number.free_symbols]
            return max(integers, default=concrete(size))

    @cached_property
    def _sizes_of_blocks(self) -> Mapping[Any, list[dict[Any, Integer]]]:
        """By shape environment of a block, the numbers for its symbols in each of its calls."""
        sizes = defaultdict[Any, list[dict[Any, Integer]]](list)
        for module in self._graphs.graphs().values():
            for env, by_symbol in sizes_of_calls(module.graph):
                numbers = {symbol: Integer(self.size(size)) for symbol, size in by_symbol.items()}
                if numbers not in sizes[env]:
                    sizes[env].append(numbers)
        return sizes

    def for_gradients(self, output_grads: Sequence[object]) -> tuple[SplitFunctions, Missing]:
        """The functions for a backward in which some outputs have no gradient.

        The first few sets of missing gradients get specialized graphs. For later sets, and if
        specialized graphs cannot be built, missing gradients are zeros.

        Args:
            output_grads: one gradient for each output; None for a missing one.

        Returns:
            (functions for this backward, the parameters and inputs that get no gradient).
        """
        for _, at in self._tangents:  # written out, because every backward runs it
            if output_grads[at] is None:
                break
        else:
            return self, NONE_MISSING
        missing = self.dependence.missing(output_grads)
        variants = self._specialized
        # Zeros in place of gradients would be written as if they were gradients.
        is_free = self.written or len(variants) < _MAX_SPECIALIZED
        if missing.outputs not in variants and is_free:
            variants[missing.outputs] = self._without(missing.outputs)
        functions = variants.get(missing.outputs) or self
        if functions._key != self._key:
            key = self._key
            functions = functions._resized.get(key) or functions._twin(key, self._size)
        return functions, missing

    def _without(self, missing: frozenset[str]) -> SplitFunctions | None:
        """The functions for a backward without the gradients of these outputs; None if their graphs
        would need zeros of an unknown size.
        """
        try:
            form = GraphForm(missing=missing)
            graphs = with_graph_passes(When.MISSING_GRADIENTS, self._graphs, form)
        except UnknownSizeError:
            return None
        variant = copy.copy(self)
        for name in [*vars(variant)]:
            if isinstance(getattr(type(self), name, None), cached_property):
                del vars(variant)[name]
        variant._graphs, variant._resized, variant._specialized = graphs, CallCache(), {}
        variant.dependence = GradientDependence(graphs, self.capture.inputs, self._tangents)
        variant._tangents = [(name, at) for name, at in self._tangents if name not in missing]
        suffix = f"_without_{len(self._specialized) + 1}"
        variant.backward_graphs = self.backward_graphs.without(missing, graphs, suffix)
        return variant

    @cached_property
    def sums(self) -> Sequence[str]:
        """Names of the tensors to which W adds: buffers, and tensors that are attributes of
        parameters.
        """
        weight = self._graphs.backward_weight
        return [] if weight is None else [role.name for role in written(weight.graph)]

    @property
    def written(self) -> Sequence[str]:
        """Names of the tensors that I or W writes: buffers, and tensors that are attributes of
        parameters.
        """
        return [role.name for role in self.backward_graphs.state if role.kind is Kind.WRITTEN]

    @property
    def specialized(self) -> Sequence[frozenset[str]]:
        """The sets of outputs without a gradient for which I, W and B were specialized."""
        return [missing for missing, functions in self._specialized.items() if functions]

    def _tangent_specs(self) -> dict[str, TensorSpec]:
        tangents = inputs(self._graphs.joint.graph, Kind.TANGENT)
        return self._specs({role.name: node.meta["val"] for role, node in tangents.items()})

    def _specs(self, traced: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """Specs of traced tensors with the sizes that they have in a call."""
        return {name: TensorSpec.of(value).at(self._size) for name, value in traced.items()}

    @staticmethod
    def sentinel_parameters(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """A few parameters to pass to F's autograd function as further arguments. The function
        returns no gradients for these arguments, but learns from them whether a backward requests
        gradients of parameters.

        Each argument costs the engine a visit, so only the first and last few parameters are used.
        """
        if len(parameters) <= 2 * _SENTINELS_PER_END:
            return parameters
        return [*parameters[:_SENTINELS_PER_END], *parameters[-_SENTINELS_PER_END:]]

    @cached_property
    def autocast_guard(self) -> AutocastGuard:
        """The check of autocast before a backward that autograd runs."""
        return AutocastGuard(self._graphs.backward or self._graphs.joint)

    @cached_property
    def draws(self) -> bool:
        """Whether the graphs may draw random numbers. Backward graphs draw only in custom
        operators.
        """
        return any(map(may_draw, inner_calls(self._graphs.joint.graph)))

    @property
    def is_eager(self) -> bool:
        """Whether kernels are those of plain autograd, which have its bits."""
        return not self._backend.compiles

    @property
    def adds_exactly(self) -> bool:
        """Whether sums of weight gradients have autograd's order."""
        return self._accumulation == ACCUMULATION["exact"]

    @property
    def generated(self) -> Mapping[str, str]:
        """Maps the name of each graph compiled so far to the source that the backend generated."""
        return self._backend.generated

    def source(
        self, call: str, dtype: torch.dtype | None = None, *, adds: bool = False, count: int = 1
    ) -> fx.GraphModule:
        """The FX graph of a call, as the backend gets it.

        Args:
            call: ``"forward"``, ``"backward_input"``, ``"backward_weight"`` or ``"backward"``.
            dtype: see ``BackwardGraphs.graph_source``.
            adds: see ``BackwardGraphs.graph_source``.
            count: see ``BackwardGraphs.graph_source``.
        """
        if call == "forward":
            return self.graphs.forward
        return self.backward_graphs.graph_source(call, dtype, adds=adds, count=count)

    @property
    def _graph_class(self) -> Callable[..., GradientGraph]:
        return GradientGraph

    def _constants_of(self, modules: Iterable[fx.GraphModule]) -> Constants:
        return Constants.of(modules, self.capture.guards.constant_path)

    @cached_property
    def forward_constants(self) -> Constants:
        """The constants that F reads."""
        return self._constants_of([self._graphs.forward])

    @cached_property
    def specs_by_path(self) -> dict[str, TensorSpec]:
        """Maps the path of each output that is a tensor to its spec."""
        pairs = outputs(self._graphs.forward.graph, Kind.OUTPUT, Kind.UPDATE)
        values = {role.name: getattr(value, "meta", {}).get("val") for role, value in pairs}
        return self._specs({name: v for name, v in values.items() if isinstance(v, Tensor)})

    def size_rule(self, leaves: Sequence[Any]) -> SizeRule | None:
        """The sizes of the outputs as expressions of the sizes of the inputs; None if all sizes are
        fixed.

        Args:
            leaves: the inputs of a call; only those that are no tensors are read.
        """
        pairs = outputs(self._graphs.forward.graph, Kind.OUTPUT)
        shapes = {role.name: value.meta["val"].shape for role, value in pairs}
        if self.capture.sizes is None:
            return None
        return self.capture.sizes.rule(leaves, [shapes[name] for name in self.capture.outputs])

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of forward and backward of one call, without recomputation.
        Matrix products, attention and convolutions count.
        """
        return sum(flops(node, self.size) for node in inner_calls(self._graphs.joint.graph))

    @cached_property
    def caller_memory(self) -> list[tuple[int, int | None]]:
        """A pair for each deferred tensor in the caller's memory: (its position, position of the
        input whose storage it shares). The second is None if the storage is a tangent's.
        """
        lenders = lender_roles(self._graphs)
        if not lenders:
            return []
        places = {name: at for at, name in enumerate(self.capture.inputs)}
        roles = enumerate(self.backward_graphs.deferred_layout.roles)
        borrowed = [(at, lenders[role]) for at, role in roles if role in lenders]
        return [(at, places.get(r.name) if r.kind is Kind.INPUT else None) for at, r in borrowed]

    @cached_property
    def visible_deferred(self) -> list[int]:
        """Positions of deferred tensors that share storage with an output, a tangent or an input
        gradient.
        """
        inputs = {at for at, place in self.caller_memory if place is not None}
        exposed = self.backward_graphs.deferred_layout.layout.exposed
        return [at for at in exposed if at not in inputs]

    @cached_property
    def borrowed(self) -> list[bool]:
        """For each of ``parameter_names``, whether the gradient must be copied, see
        ``borrowed_gradients``.
        """
        return [name in self.dependence.borrowed for name in self.parameter_names]

    @cached_property
    def constant_outputs(self) -> list[int]:
        """Positions of outputs that are not differentiable."""
        names = enumerate(self.output_names)
        return [at for at, name in names if name not in self.tangent_specs]

    def run(self, state: State, leaves: list[Any]) -> ForwardResult:
        """Run F, and write new values of buffers into the tensors of ``state``.

        Args:
            state: parameters and buffers by name.
            leaves: the flattened ``(args, kwargs)``; emptied.

        Raises:
            SplitError: an input shares memory with a buffer that the module writes into.
        """
        if is_autocast():
            with without_autocast():
                return SplitFunctions.run(self, state, leaves)
        if self.updated_state:
            refuse_state_overlap(self, leaves, state)
        result = self.forward(state, leaves)
        if self.updated_state:
            write_buffers([state[name] for name in self.updated_state], result.updates)
        return result

    def forward(self, state: State, leaves: list[Any]) -> ForwardResult:
        """F: run the forward, and return new values of buffers without writing them.

        Args:
            state: parameters and buffers by name.
            leaves: the flattened ``(args, kwargs)``; emptied.
        """
        read = tuple(map(state.__getitem__, self._read_state))
        pool = [*map(state.__getitem__, self.forward_state), *leaves]
        leaves.clear()
        results = self._forward(pool)
        outputs = len(self.output_names)
        end = outputs + len(self.updated_state)
        saved = self.residuals(self._saves, results[end:], read)
        return ForwardResult(results[:outputs], results[outputs:end], saved)

    def backward_input(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Residuals, Sequence[Tensor]]:
        """I: compute the gradients of inputs, and keep the deferred tensors for W.

        Args:
            saved: the residuals of F; taken.
            output_grads: gradients in the order of ``output_names``; emptied.
            gradients: accumulators for ``early_parameters``; None: return new tensors.
            dtype: dtype of the accumulators; None for the dtype of each gradient.

        Returns:
            (input gradients in the order of ``capture.inputs``, None for inputs without a gradient;
            residuals for W; gradients of ``early_parameters``, or the accumulators).

        Raises:
            SplitError: a gradient does not fit its output, or a saved tensor was written
                in place since the forward.
        """
        if is_autocast():
            with without_autocast():
                return SplitFunctions.backward_input(self, saved, output_grads, gradients, dtype)
        state, (_, state_positions, layout) = saved.state, self.backward_graphs.deferred_layout
        pool = self._backward_pool(saved.take_arguments(), output_grads)
        results, early = self.backward_graphs.input.run(pool, gradients, dtype)
        count = len(self.capture.inputs)
        weight_state = tuple(map(state.__getitem__, state_positions))
        deferred = self.residuals(layout, results[count:], weight_state)
        return results[:count], deferred, early

    def backward_weight(
        self,
        deferred: Residuals,
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        """W: compute the gradients of ``late_parameters`` from the deferred tensors.

        Args:
            deferred: the residuals of I; taken.
            gradients: accumulators in the order of ``late_parameters``, each in memory that no
                other argument shares; None: return new tensors.
            dtype: dtype of the accumulators; None for the dtype of each gradient.

        Returns:
            the accumulators, or new tensors in the order of ``late_parameters``. Gradients of
            parameters in ``dependence.borrowed`` may share storage.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        run = self.backward_graphs.weight.run
        if deferred.live:
            run = own_writes(deferred.live)(run)
        return run(deferred.take_arguments(), gradients, dtype)[1]

    def most_joined(self, dtype: torch.dtype | None = None) -> int:
        """The largest number of microbatches that one call of ``joined_weight`` may run; 1 if
        joining gains nothing.

        Args:
            dtype: dtype of the accumulators; None for the dtype of each gradient.
        """
        return self.backward_graphs.most_joined(dtype)

    def joined_weight(
        self,
        deferred: Sequence[Residuals],
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        """W of several microbatches as one call; returns the sums of their gradients as
        ``backward_weight`` returns gradients.

        Args:
            deferred: the residuals of I of each microbatch, with the same parameters and buffers;
                taken.
            gradients: see ``backward_weight``.
            dtype: see ``backward_weight``.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        pool: list[Any] = []
        for residuals in deferred:
            state = residuals.state
            del pool[len(pool) - len(state) :]  # parameters and buffers come once, at the end
            pool += residuals.take_arguments()
        return self.backward_graphs.weight.run(pool, gradients, dtype, len(deferred))[1]

    @cached_property
    def sums_microbatches(self) -> bool:
        """Whether ``sum_weights`` may be used. It may if the gradients of some microbatches may be
        summed first, and their sum added to that of other microbatches.
        """
        return self._accumulation != ACCUMULATION["exact"] and self.dependence.dense

    def sum_weights(self, deferred: Sequence[Residuals]) -> Sequence[Tensor]:
        """The sums of the weight gradients of several microbatches, as new tensors.

        Args:
            deferred: as for ``joined_weight``.
        """
        most, sums = self.most_joined(), None
        for start in range(0, len(deferred), most):
            run = deferred[start : start + most]
            joins = len(run) > 1
            weight = self.joined_weight(run, sums) if joins else self.backward_weight(run[0], sums)
            if sums is None:
                borrowed = [name in self.dependence.borrowed for name in self.late_parameters]
                pairs = zip(weight, borrowed, strict=True)
                sums = Accumulators([grad.clone() if copied else grad for grad, copied in pairs])
        return () if sums is None else sums.tensors

    def backward(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """B: I and W as one graph.

        Arguments are those of ``backward_input``, with accumulators for ``parameter_names``.
        Returns (input gradients, gradients of ``parameter_names`` or the accumulators).

        Raises:
            SplitError: as for ``backward_input``.
        """
        if self.backward_graphs.defers_whole_backward:
            grads, deferred, _ = self.backward_input(saved, output_grads)
            return grads, self.backward_weight(deferred, gradients, dtype)
        run = self.backward_graphs.fused.run
        if saved.live:
            run = own_writes(saved.live)(run)
        return run(self._backward_pool(saved.take_arguments(), output_grads), gradients, dtype)

    def backward_slices(
        self, saved: Residuals, output_grads: list[Tensor | None]
    ) -> Iterator[dict[Role, Any]]:
        """B in slices: the iterator runs one slice for each item, see ``BackwardGraphs.sliced``.

        Arguments and errors are those of ``backward_input``.

        Returns:
            an iterator that yields, for each slice, a dictionary from role to gradient of the
            gradients that the slice completes.
        """
        pool = self._backward_pool(saved.take_arguments(), output_grads)
        graphs = self.backward_graphs
        return graphs.sliced.run(dict(zip(graphs.arguments, pool, strict=True)))

    def _backward_pool(self, saved: list[Tensor], output_grads: list[Tensor | None]) -> list[Any]:
        """The arguments of I or B in one list. The list has the only references to them, so that
        the graph can free each at its last use.
        """
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
        """An output's gradient with the strides of the capture; zeros instead of None.

        Raises:
            SplitError: the gradient has another shape or dtype.
        """
        spec = self.tangent_specs[name]
        if grad is None:
            return spec.zeros()
        if grad.shape != spec.shape or grad.dtype != spec.dtype:
            raise SplitError(
                f"the gradient of {name} must be {spec.dtype} {list(spec.shape)}, "
                f"got {grad.dtype} {list(grad.shape)}; pass a gradient like the output"
            )
        return spec.conform(grad)


def _parameters(module: fx.GraphModule | None) -> list[str]:
    """Names of the parameters whose gradients a graph returns."""
    if module is None:
        return []
    return [role.name for role, _ in outputs(module.graph, Kind.PARAMETER_GRAD)]
