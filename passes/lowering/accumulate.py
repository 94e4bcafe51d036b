"""Writes inside a graph: each gradient is added where it is computed, and state is written.

If a graph returned the weight gradients of a microbatch for the caller to add, all gradients would
be alive at once, beside their sums. Added inside the graph, each is freed as soon as it is
computed. ``accumulator.add_(gradient)`` rounds as autograd's own accumulation does. The first
microbatch of a step may write ``accumulator.copy_(gradient)`` instead, into memory that is not
initialized.

State that a user's backward writes is written in place, too, instead of returned::

    total = add(into, product)     add_(into, product)      a sum, where it is computed
    return [..., maximum]          copy_(into, maximum)     other state, at the end of the graph
"""

from __future__ import annotations

import functools
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_free
from ..analysis.operators import SUMS, WRITE
from ..graph import (
    BACKWARD_WRITE,
    SUBGRAPH,
    Kind,
    Role,
    SplitGraphs,
    add_placeholder,
    computed_outputs,
    copy_nodes,
    copy_placeholder,
    inputs,
    module_like,
    outputs,
    placeholders,
    reachable,
    set_outputs,
    tensor_of,
)
from ..partition.extract import copy_behind
from ..subgraph import Subgraph, call_subgraph, operands, subgraph_of
from .forms import Changed, GraphForm
from .fuse import JOINED, fuse

REPORT = Role(Kind.REPORT, "complete")


def accumulate_gradients(program: SplitGraphs, form: GraphForm) -> Changed:
    """Graph pass: make the graph ``form.graph`` add weight gradients into accumulators, see
    ``accumulate``.
    """
    module = program.graphs()[form.graph]
    adding = accumulate(module, form.dtype, overwrites=form.writes_first, reports=form.reports)
    if form.fuses != "none":
        fuse(adding, lambda node: form.fuses == "all" or JOINED in node.meta)
    return {f"{form.graph}_accumulating": adding}


def accumulate(
    module: fx.GraphModule,
    dtype: torch.dtype | None = None,
    *,
    overwrites: bool = False,
    reports: Sequence[frozenset[str]] = (),
) -> fx.GraphModule:
    """Return a graph that takes an accumulator for each parameter's gradient. It adds the gradient
    in place instead of returning it.

    Args:
        module: a graph that returns gradients of parameters.
        dtype: the dtype of the accumulators; None: each has its gradient's dtype.
        overwrites: whether gradients overwrite the accumulators, instead of being added.
        reports: sets of parameters. The graph takes one more input, a function. It calls the
            function with the index of a set as soon as all gradients of the set are added.
    """
    aten = torch.ops.aten
    write = aten.copy_.default if overwrites else aten.add_.Tensor
    results = outputs(module.graph)
    sums = dict(computed_outputs(module.graph, Kind.PARAMETER_GRAD))
    graph = fx.Graph()
    copies = {node: copy_placeholder(graph, node) for node in placeholders(module.graph)}
    totals = {role: _accumulator(graph, role.name, value, dtype) for role, value in sums.items()}
    adding = _calls_that_add(sums)
    items = {sums[role] for roles in adding.values() for role in roles}
    ready = _ready(module.graph, {role: v for role, v in sums.items() if v not in items})
    adding_form = functools.cache(functools.partial(_adding, dtype=dtype, overwrites=overwrites))
    pending = _Reports(graph, reports, {role.name for role in sums})
    for node in [None, *module.graph.nodes]:
        if node in adding:
            called = adding_form(node.meta[SUBGRAPH])
            arguments = [copies[operand] for operand in operands(node)]
            call_subgraph(graph, called, arguments, [], [totals[role] for role in adding[node]])
        elif node is not None and node.op not in {"placeholder", "output"} and node not in items:
            copy_behind(graph, node, copies)
        for role in ready[node]:
            copy_behind(graph, sums[role], copies)
            write_into(graph, write, totals[role], copies[sums[role]])
        pending.remove(role.name for role in (*adding.get(node, ()), *ready[node]))
    kept = [(role, value) for role, value in results if role not in sums]
    set_outputs(graph, kept, copies)
    return module_like(module, graph, "accumulating")


def completion_order(module: fx.GraphModule) -> list[str]:
    """Names of parameters, in the order in which a graph completes their accumulators."""
    order = {node: at for at, node in enumerate(module.graph.nodes)}
    accumulators = inputs(module.graph, Kind.ACCUMULATOR).items()
    last = {role.name: max(map(order.__getitem__, node.users)) for role, node in accumulators}
    return sorted(last, key=last.__getitem__)


class _Reports:
    """Adds calls to a graph that report sets of parameters whose gradients are complete."""

    def __init__(
        self, graph: fx.Graph, reports: Sequence[frozenset[str]], names: Collection[str]
    ) -> None:
        self._graph = graph
        self._pending = {number: {*part}.intersection(names) for number, part in enumerate(reports)}
        if reports:
            self._function = add_placeholder(graph, "report", None, REPORT)

    def remove(self, names: Iterable[str]) -> None:
        """Remove parameters whose gradients are complete from all sets. Add a report for each set
        that is then empty.
        """
        complete = {*names}
        for number, part in [*self._pending.items()]:
            part -= complete
            if not part:
                del self._pending[number]
                node = self._graph.call_function(operator.call, (self._function, number))
                node.meta = {"val": None}


def _calls_that_add(sums: Mapping[Role, fx.Node]) -> dict[fx.Node | None, list[Role]]:
    """Map calls of subgraphs that return only gradients in ``sums`` to the roles of these
    gradients, in order. Such a subgraph can add its gradients to the accumulators itself.
    """
    adding: dict[fx.Node | None, list[Role]] = {}
    roles = {value: role for role, value in sums.items()}
    for value in roles:
        called = subgraph_of(value)
        items = list(value.args[0].users) if called else []  # type: ignore[union-attr]
        items.sort(key=lambda item: item.args[1])
        alone = all([*item.users] == [*value.users] for item in items)
        if called and alone and len(items) == len(called.values) and {*items} <= roles.keys():
            adding[value.args[0]] = [roles[item] for item in items]  # type: ignore[index]
    return adding


def _adding(called: Subgraph, *, dtype: torch.dtype | None, overwrites: bool) -> Subgraph:
    module = accumulate(called.module, dtype, overwrites=overwrites)
    return Subgraph.of(f"{called.name}_{'writing' if overwrites else 'accumulating'}", module)


def _ready(
    graph: fx.Graph, sums: Mapping[Role, fx.Node]
) -> Mapping[fx.Node | None, Sequence[Role]]:
    """Map each node to the roles of the gradients to add directly after the node. The key None has
    the gradients to add before all nodes.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    ready: dict[fx.Node | None, list[Role]] = defaultdict(list)
    for role, value in sums.items():
        ready[last_work(value, order)].append(role)
    return ready


def _accumulator(
    graph: fx.Graph, name: str, gradient: fx.Node, dtype: torch.dtype | None
) -> fx.Node:
    value = tensor_of(gradient)
    total = None if value is None else value.new_empty(value.shape, dtype=dtype)
    identifier = re.sub(r"\W", "_", f"sum_{name}")
    return add_placeholder(graph, identifier, total, Role(Kind.ACCUMULATOR, name))


def last_work(value: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    """The last operator that a value depends on, not counting views; None if only views compute it.

    A view of a gradient may come much later in the graph than the gradient, and would keep it alive
    until then.
    """
    bases = reachable([value], lambda node: node.all_input_nodes if is_free(node) else [])
    work = (node for node in bases if not is_free(node) and node.op != "placeholder")
    return max(work, key=order.__getitem__, default=None)


def write_into(graph: fx.Graph, write: Any, into: fx.Node, value: fx.Node) -> None:
    """Append an operator that adds or copies a value into a tensor.

    Args:
        graph: the graph.
        write: the operator, such as ``aten.add_.Tensor``.
        into: the tensor that is written.
        value: the value; the operator gets its source lines.
    """
    node = graph.call_function(write, (into, value))
    node.meta = {key: v for key, v in value.meta.items() if key == "stack_trace"}
    node.meta["val"] = into.meta["val"]


# --- state that a user's backward writes ----------------------------------------------------------


def written(graph: fx.Graph) -> list[Role]:
    """The roles of the state that a backward graph writes, in order."""
    return [Role(Kind.WRITTEN, role.name) for role, _ in outputs(graph, *BACKWARD_WRITE)]


def write_state(program: SplitGraphs, form: GraphForm) -> Changed:
    """Graph pass: make the backward graph ``form.graph`` write state in place, instead of returning
    new values. Returns an empty mapping if the graph writes no state.
    """
    module = program.graphs()[form.graph]
    if not written(module.graph):
        return {}
    graph = fx.Graph()
    copies = copy_nodes(graph, module)
    into = {role.name: node for role, node in inputs(graph, Kind.WRITTEN).items()}
    for role, value in outputs(module.graph, *BACKWARD_WRITE):
        new = copies[value]
        if role.name not in into:  # the new value does not depend on the old one
            into[role.name] = _placeholder(graph, role.name, new)
        if role.kind is Kind.BACKWARD_UPDATE:
            write_into(graph, WRITE, into[role.name], new)
        elif (sums := _additions(new, into[role.name])) is None:
            with graph.inserting_after(new):
                write_into(graph, WRITE, into[role.name], new)
        else:
            for node in sums:
                node.target = SUMS[node.target]
                node.args = (into[role.name], *node.args[1:])
    kept = [pair for pair in outputs(module.graph) if pair[0].kind not in BACKWARD_WRITE]
    set_outputs(graph, kept, copies)
    return {form.graph: module_like(module, graph, "writing")}


def _additions(new: Any, into: fx.Node) -> list[fx.Node] | None:
    """The additions that compute ``new`` from ``into``; None if other operators take part."""
    sums: list[fx.Node] = []
    while new is not into:
        if new.target not in SUMS:
            return None
        sums.append(new)
        new = new.args[0]
    return sums


def _placeholder(graph: fx.Graph, name: str, value: fx.Node) -> fx.Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        role = Role(Kind.WRITTEN, name)
        return add_placeholder(graph, f"{value.name}_into", value.meta["val"], role)
