"""Backward graphs for a backward in which some outputs of the module get no gradient.

Autograd runs nothing that depends on the gradients of such outputs alone. Zeros in place of these
gradients would be as large as the outputs, such as logits beside a loss. Every operator down to the
inputs would run on the zeros, and an infinite derivative would turn them into NaN.

    node that depends on missing gradients alone    dropped
    sum of two gradients, one missing               the other gradient
    other operator, an operand missing              zeros for the operand, as autograd makes them

The gradient of a module's own loss (``own_gradients``) always arrives.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Hashable, Mapping, MutableMapping

import torch
from torch import fx

from ..analysis.aliasing import spanned_elements
from ..errors import UnknownSizeError
from ..graph import (
    SUBGRAPH,
    Kind,
    Role,
    SplitGraphs,
    copy_node,
    inputs,
    is_fixed,
    is_size,
    module_like,
    outputs,
    own_gradients,
    placeholders,
    set_outputs,
    source_line,
    tensor_of,
)
from ..rewrites.emit import eliminate_dead_code, emit
from ..subgraph import Subgraph, call_subgraph, operands, reached
from .forms import Changed, GraphForm

aten = torch.ops.aten

Dependence = dict[fx.Node, bool | None]
"""Node -> whether a gradient that it depends on arrives; None if it depends on none."""


def without_tangents(program: SplitGraphs, form: GraphForm) -> Changed:
    """Graph pass: I, W and B for a backward in which some outputs get no gradient. Gradients that
    depend on missing gradients alone are not returned.

    Args:
        program: split graphs with a backward; not changed.
        form: the form of the graphs; ``form.missing`` has the names of the outputs without a
            gradient.

    Raises:
        UnknownSizeError: an operator needs zeros whose size is not known before the graph runs.
    """
    graphs, calls = program.graphs(), _SpecializedCalls()
    first, late = graphs["backward_input"], graphs["backward_weight"]
    tangents = inputs(program.joint.graph, Kind.TANGENT)
    arrivals = _own_arrivals(program) | {r: r.name not in form.missing for r in tangents}
    depends = _dependence(first.graph, arrivals)
    crossing = {role: depends[value] for role, value in outputs(first.graph, Kind.DEFERRED)}
    weight = calls.specialize(late, arrivals | crossing)
    unread = crossing.keys() - inputs(weight.graph)
    return {
        "backward": calls.specialize(graphs["backward"], arrivals),
        "backward_input": calls.specialize(first, arrivals, unread),
        "backward_weight": weight,
    }


def _own_arrivals(program: SplitGraphs) -> dict[Role, bool | None]:
    """True for the gradient of the module's own loss, and for saved tensors that depend on it."""
    buffers: dict[Role, bool | None] = dict.fromkeys(own_gradients(program.joint.graph), True)
    if not buffers:
        return {}
    graph = program.forward.graph
    depends = _dependence(graph, buffers)
    return buffers | {role: True for role, node in outputs(graph, Kind.SAVED) if depends[node]}


def _dependence(graph: fx.Graph, arrivals: Mapping[Role, bool | None]) -> Dependence:
    """For each node: True if it depends on a gradient that arrives, False if on missing gradients
    only, None if on no gradient.
    """
    starts = {node: arrivals.get(role) for role, node in inputs(graph).items()}
    starts = {node: arrives for node, arrives in starts.items() if arrives is not None}
    arriving = sum(1 << at for at, arrives in enumerate(starts.values()) if arrives)
    reach = reached(graph, [*starts])
    return {node: bool(bits & arriving) if bits else None for node, bits in reach.items()}


class _SpecializedCalls:
    """Specialized copies of subgraphs, one for each set of missing gradients."""

    def __init__(self) -> None:
        self._variants: dict[Hashable, Subgraph] = {}

    def specialize(
        self,
        module: fx.GraphModule,
        arrivals: Mapping[Role, bool | None],
        unread: Collection[Role] = (),
    ) -> fx.GraphModule:
        """A copy of a subgraph's module, without the results in ``unread`` and without the nodes
        that depend on missing gradients alone.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        depends = _dependence(module.graph, arrivals)
        missing = {node for node, arrives in depends.items() if arrives is False}
        for node in module.graph.nodes:
            if node in missing or node in copies or node.op == "output":
                continue
            if missing.isdisjoint(node.all_input_nodes):
                copies[node] = copy_node(graph, node, copies)
            elif SUBGRAPH in node.meta:
                self._specialize_call(node, graph, depends, copies)
            else:
                copies[node] = _specialized_operator(node, graph, missing, copies)
        pairs = [(r, v) for r, v in outputs(module.graph) if not (r in unread or v in missing)]
        set_outputs(graph, pairs, copies)
        eliminate_dead_code(graph)
        for node in placeholders(graph):
            if not (node.users or is_size(node)):  # Inductor reads sizes that no node does
                graph.erase_node(node)
        return module_like(module, graph, type(module).__name__)

    def _specialize_call(
        self, node: fx.Node, graph: fx.Graph, depends: Dependence, copies: dict[fx.Node, fx.Node]
    ) -> None:
        """Add a specialized copy of a call, and its results to ``copies``."""
        called: Subgraph = node.meta[SUBGRAPH]
        operand_of = dict(zip(called.arguments, operands(node), strict=True))
        arrivals = {role: depends[operand] for role, operand in operand_of.items()}
        key = called, tuple(arrivals.values())
        if key not in self._variants:
            name = f"{called.name}_{len(self._variants) + 1}"
            self._variants[key] = Subgraph.of(name, self.specialize(called.module, arrivals))
        variant = self._variants[key]
        roles = [role for role, _ in outputs(called.module.graph)]
        value_of = dict(zip(roles, node.meta["val"], strict=True))
        results = call_subgraph(
            graph,
            variant,
            [copies[operand_of[role]] for role in variant.arguments],
            [value_of[role] for role, _ in outputs(variant.module.graph)],
        )
        for item in node.users:
            place = variant.results.get(roles[item.args[1]])  # type: ignore[index]
            if place is not None:
                is_computed = isinstance(place, int)
                copies[item] = results[place] if is_computed else copies[operand_of[place]]  # type: ignore[index]


def _specialized_operator(
    node: fx.Node,
    graph: fx.Graph,
    missing: Collection[fx.Node],
    copies: MutableMapping[fx.Node, fx.Node],
) -> fx.Node:
    """A copy of an operator without its missing operands. A sum is replaced by its other term. For
    other operators, zeros replace the missing operand.
    """
    if node.target is aten.add.Tensor and not node.kwargs:
        (term,) = [copies[operand] for operand in node.all_input_nodes if operand not in missing]
        if _layout(term) != _layout(node):
            contiguous = {"memory_format": torch.contiguous_format}
            term = emit(graph, term, aten.clone.default, term, **contiguous)
        if _layout(term) == _layout(node):
            return term
    absent = (operand for operand in node.all_input_nodes if operand in missing)
    zeros = {operand: _zeros(operand, graph) for operand in absent}
    return copy_node(graph, node, ChainMap(zeros, copies))


def _layout(node: fx.Node) -> tuple[object, ...]:
    """Dtype, sizes and strides of a node. Sizes and strides are text, because comparing symbols
    adds guards.
    """
    value = node.meta["val"]
    return value.dtype, str(value.shape), str(value.stride())


def _zeros(like: fx.Node, graph: fx.Graph) -> fx.Node:
    """Add zeros with the shape, strides and dtype of a node's value.

    Raises:
        UnknownSizeError: the shape is symbolic.
    """
    value = tensor_of(like)
    if value is None or not is_fixed(value):
        raise UnknownSizeError(
            f"the missing gradient of {like.name} ({source_line(like)}) must be replaced by zeros, "
            "but their size is known only when the graph runs"
        )
    options = {"dtype": value.dtype, "device": value.device}
    length = max(1, spanned_elements(value.shape, value.stride()))
    flat = emit(graph, like, aten.full.default, [length], 0, **options)
    return emit(graph, like, aten.as_strided.default, flat, [*value.shape], [*value.stride()])
