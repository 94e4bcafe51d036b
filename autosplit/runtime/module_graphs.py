"""``ModuleGraphs``: the compiled graphs of one captured module, for its sizes and gradients.

graphs of one capture ──► for_sizes: the same graphs with other sizes
                      └─► for_gradients: I, W and B without the gradients of some outputs
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
from sympy import Integer
from torch import Tensor, fx

from autosplit.backends.backend import Backend
from autosplit.errors import CaptureError
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
from autosplit.runtime.tensor_spec import TensorSpec

from .accumulation import ACCUMULATION, Accumulation
from .backward_graphs import BackwardGraphs, live_positions, state_roles
from .compiled_graph import GradientGraph, compile_graph
from .gradient_dependence import GradientDependence
from .refusals import AutocastGuard

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture
    from autosplit.capture.size_rule import SizeRule


class ModuleGraphs:
    """The compiled graphs of one captured module, and static facts about their inputs and outputs.
    Backward graphs are compiled at their first use.

    Args:
        traced: the captured module.
        graphs: the FX graphs.
        backend: compiles the graphs.
        accumulation: how matrix products add gradients.

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
        joins: whether W of several microbatches may run as one call.
        has_memory_setting: whether the caller can choose a memory setting.
    """

    joins = True
    has_memory_setting = True

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
        self._resized = CallCache[tuple[int, ...], Self]()
        self._specialized: dict[frozenset[str], Self | None] = {}
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
            advice=self._advice(state),
        )

    def _advice(self, state: Iterable[Role]) -> dict[str, str]:
        """Remedies for writes into state that the backward reads, by name of the state."""
        texts = {
            Kind.BUFFER: "A later forward in train mode may have written the buffers: run it after "
            "the backward."
        }
        if self.has_memory_setting and self._graphs.memory.recompute:
            texts[Kind.PARAMETER] = (
                'With memory="fast", nothing is recomputed, and the backward reads fewer '
                "parameters."
            )
        return {role.name: texts[role.kind] for role in state if role.kind in texts}

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
        dtypes = {r: v.meta["val"].dtype for r, v in outputs(graphs.forward.graph, Kind.UPDATE)}
        buffers = [role for role in updated if role.name not in leaf_names]
        buffers.sort(key=lambda role: str(dtypes[role]))  # each dtype is written by one call
        results = [*by_kind[Kind.OUTPUT], *(role for role in updated if role.name in leaf_names)]
        self.updated_inputs = [role.name for role in updated if role.name in leaf_names]
        self.updated_state = [role.name for role in buffers]
        ends = accumulate(Counter(dtypes[role] for role in buffers).values(), initial=0)
        self._slices_by_dtype = [slice(start, end) for start, end in pairwise(ends)]
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

    def for_sizes(self, leaves: Sequence[Any]) -> Self:
        """The functions for a call's input sizes; one object for each combination of sizes.

        Args:
            leaves: the inputs of the call, which must fulfil the guards.
        """
        sizes = self.capture.sizes
        if sizes is None:
            return self
        key = sizes.size_key(leaves)
        return self._resized.get(key) or self._twin(key, sizes.value(leaves))

    def _twin(self, key: tuple[int, ...], size: Callable[[Any], int]) -> Self:
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

    def _without(self, missing: frozenset[str]) -> Self | None:
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


def _parameters(module: fx.GraphModule | None) -> list[str]:
    """Names of the parameters whose gradients a graph returns."""
    if module is None:
        return []
    return [role.name for role, _ in outputs(module.graph, Kind.PARAMETER_GRAD)]
