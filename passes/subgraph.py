"""``Subgraph``: a graph that a node of another graph calls.

Layers of one kind have the same F, I and W. The graph around them has one node per call: an
operator that takes and returns a list of tensors, with the called graph in its ``meta``. To passes
a call is an unknown operator: they do not repeat it, and only data dependences order it. ``inline``
replaces the calls by the operators of the called graphs.

``outline`` also turns the operators between the calls into called graphs. A slow compiler then
compiles each kind of block once, and the operators around the blocks once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from .analysis.aliasing import is_free, storage_root
from .analysis.operator_cost import duration
from .analysis.operators import is_random, is_report
from .graph import (
    ORIGIN,
    SUBGRAPH,
    Kind,
    Origin,
    Role,
    SplitGraphs,
    add_call,
    add_placeholder,
    calls,
    computed_outputs,
    copy_node,
    copy_nodes,
    copy_placeholder,
    inputs,
    is_input,
    module_like,
    outputs,
    placeholders,
    role_of,
    set_outputs,
)

# These operators never run: a graph with calls is compiled into calls of the graphs' code.
_LIBRARY = torch.library.Library("autosplit", "DEF")
_LIBRARY.define("subgraph(str name, Tensor[] arguments) -> Tensor[]")
_LIBRARY.define(
    "drawing_subgraph(str name, Tensor[] arguments) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define("adding_subgraph(str name, Tensor[] arguments, Tensor(a!)[] sums) -> Tensor[]")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Subgraph:
    """A graph that nodes of another graph call.

    Attributes:
        name: unique among the subgraphs that one graph calls.
        module: the called graph; returns each computed value once.
        results: maps the role of a result to its position among the returned values, or, if the
            result is an input, to the role of the input. Results without an entry are constants.
        recompute_time: the estimated time for which the backward of the block recomputes values of
            this graph.
    """

    name: str
    module: fx.GraphModule
    results: Mapping[Role, int | Role]
    recompute_time: float = 0.0

    @classmethod
    def of(cls, name: str, module: fx.GraphModule, recompute_time: float = 0.0) -> Subgraph:
        """Make a subgraph of a graph whose inputs and outputs have roles.

        Args:
            name: the name of the subgraph.
            module: the graph; not changed.
            recompute_time: the attribute.
        """
        graph = fx.Graph()
        copies = copy_nodes(graph, module)
        places: dict[fx.Node, int] = {}
        results: dict[Role, int | Role] = {}
        pairs: list[tuple[Role, fx.Node]] = []
        for role, value in computed_outputs(module.graph):
            if value.op == "placeholder":
                results[role] = role_of(value)
                continue
            if value not in places:
                places[value] = len(pairs)
                pairs.append((role, value))
            results[role] = places[value]
        set_outputs(graph, pairs, copies)
        return cls(name, module_like(module, graph, name), results, recompute_time)

    @functools.cached_property
    def arguments(self) -> list[Role]:
        """The roles of the graph's inputs, in order."""
        return list(inputs(self.module.graph))

    @functools.cached_property
    def draws(self) -> bool:
        """Whether the subgraph draws random numbers."""
        return any(map(is_random, inner_calls(self.module.graph)))

    @functools.cached_property
    def duration(self) -> float:
        """The estimated time of all operators, in the unit of ``operator_cost.duration``."""
        return sum(map(duration, calls(self.module.graph)))

    @functools.cached_property
    def read_by(self) -> list[list[int]]:
        """For each result, the positions of the inputs that it depends on."""
        arguments = placeholders(self.module.graph)
        bits = reached(self.module.graph, arguments)
        reads = (bits[value] for _, value in outputs(self.module.graph))
        return [[at for at in range(len(arguments)) if read >> at & 1] for read in reads]

    @functools.cached_property
    def storage_owners(self) -> list[tuple[bool, int] | None]:
        """For each result, the earlier value whose storage it shares: (True, position of an earlier
        result) or (False, position of an input); None if it has storage of its own.
        """
        owners = {node: (False, at) for at, node in enumerate(placeholders(self.module.graph))}
        owners_of: list[tuple[bool, int] | None] = []
        for at, (_, value) in enumerate(outputs(self.module.graph)):
            root = storage_root(value)
            owners_of.append(owners.get(root))
            owners.setdefault(root, (True, at))
        return owners_of

    @functools.cached_property
    def values(self) -> list[torch.Tensor]:
        """Fake tensors with the forms of the returned values."""
        return [value.meta["val"] for _, value in outputs(self.module.graph)]


def call_subgraph(
    graph: fx.Graph,
    called: Subgraph,
    arguments: list[fx.Node],
    values: list[torch.Tensor],
    sums: Sequence[fx.Node] = (),
) -> list[fx.Node]:
    """Add a call of a graph; return the nodes of its results.

    Args:
        graph: the calling graph; the call goes to its insertion point.
        called: the subgraph.
        arguments: nodes of the subgraph's inputs.
        values: fake tensors with the shape, strides and dtype of each result.
        sums: nodes of the accumulators to which the subgraph adds; they are passed after the
            inputs.
    """
    if not values and not sums:
        return []
    operators = torch.ops.autosplit
    if sums:
        target = operators.adding_subgraph
    else:
        target = operators.drawing_subgraph if called.draws else operators.subgraph
    lists = (arguments, list(sums)) if sums else (arguments,)
    node = add_call(graph, target.default, called.name, *lists)
    node.meta = {"val": values, SUBGRAPH: called}
    items = []
    for at, value in enumerate(values):
        item = add_call(graph, operator.getitem, node, at)
        item.meta = {"val": value}
        items.append(item)
    return items


def subgraph_of(node: fx.Node) -> Subgraph | None:
    """The subgraph that a node calls. For a node that reads one result of a call, the subgraph that
    was called. None for other nodes.
    """
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    called: Subgraph | None = node.meta.get(SUBGRAPH) if node.op == "call_function" else None
    return called


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes on which a node's value depends. For one result of a called graph, these are the
    inputs on which that result depends.
    """
    called = subgraph_of(node)
    if called is None or node.target is not operator.getitem:
        return node.all_input_nodes
    call, place = node.args
    arguments = operands(call)  # type: ignore[arg-type]
    return [arguments[at] for at in called.read_by[place]]  # type: ignore[index]


def reached(graph: fx.Graph, starts: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For every node, the nodes of ``starts`` on which it depends, as a bit mask: bit i is
    ``starts[i]``. A walk from each start would take quadratic time in models whose every layer
    returns something, such as a cache.
    """
    bits = {node: 1 << at for at, node in enumerate(starts)}
    depends: dict[fx.Node, int] = {}
    for node in graph.nodes:
        node_bits = bits.get(node, 0)
        for operand in sources(node):
            node_bits |= depends[operand]
        depends[node] = node_bits
    return depends


def operands(node: fx.Node) -> list[fx.Node]:
    """The arguments of a call of a graph, accumulators included."""
    lists: Any = node.args[1:]
    return [operand for arguments in lists for operand in arguments]


def sums(node: fx.Node) -> list[fx.Node]:
    """The accumulators of a call of a graph."""
    return list(node.args[2]) if SUBGRAPH in node.meta and len(node.args) > 2 else []  # type: ignore[arg-type]


def subgraphs(graph: fx.Graph) -> list[Subgraph]:
    """The subgraphs that a graph calls, each once."""
    called_graphs = (node.meta.get(SUBGRAPH) for node in calls(graph))
    return list(dict.fromkeys(graph for graph in called_graphs if graph is not None))


def sizes_of_calls(graph: fx.Graph) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """For each call of a subgraph with symbolic sizes, yield (shape environment of the subgraph, a
    map from its symbols to sizes of the calling graph).
    """
    for node in calls(graph):
        called = node.meta.get(SUBGRAPH)
        if called is None:
            continue
        inner, outer = placeholders(called.module.graph), operands(node)
        sizes = (chain.from_iterable(map(_sizes, nodes)) for nodes in (inner, outer))
        pairs = [pair for pair in zip(*sizes, strict=True) if isinstance(pair[0], torch.SymInt)]
        if pairs:
            by_symbol = {size.node.expr: at_call for size, at_call in pairs}
            yield pairs[0][0].node.shape_env, by_symbol


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    """The sizes and strides of a node's tensor; of a number, the number."""
    value = node.meta.get("val")
    return (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)


def inner_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that call a function. In place of the call of a subgraph, its nodes are listed."""
    for node in calls(graph):
        called = node.meta.get(SUBGRAPH)
        if called is None:
            yield node
        else:
            yield from inner_calls(called.module.graph)


def inlined(graphs: SplitGraphs) -> SplitGraphs:
    """Split graphs with all calls of subgraphs inlined."""
    modules: dict[str, Any] = {name: inline(module) for name, module in graphs.graphs().items()}
    return dataclasses.replace(graphs, **modules)


def inline(module: fx.GraphModule) -> fx.GraphModule:
    """A graph with all calls of subgraphs inlined; ``module`` itself if it has none."""
    if not subgraphs(module.graph):
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    result = module_like(module, graph, type(module).__name__)
    for node in module.graph.nodes:
        called = node.meta.get(SUBGRAPH)
        if called is not None:
            arguments = [copies[operand] for operand in operands(node)]
            copies[node] = _inlined(result, called, arguments, node)
        elif node.target is operator.getitem and isinstance(copies.get(node.args[0]), list):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op == "output":
            set_outputs(graph, outputs(module.graph), copies)
        else:
            copies[node] = copy_node(graph, node, copies)
            if node.op == "get_attr":
                _set_constant(result, copies[node], str(node.target), module)
    result.graph = graph
    return result


def _set_constant(into: fx.GraphModule, copy: fx.Node, name: str, source: fx.GraphModule) -> None:
    """Let the copy of a node that reads a constant of ``source`` read it from ``into``.

    Args:
        into: gets an attribute.
        copy: a node of the graph for ``into``; its target is an attribute of ``source``.
        name: the name of the new attribute. If another attribute has it, the name gets longer.
        source: the module of the copied node.
    """
    value = operator.attrgetter(str(copy.target))(source)
    name = name.replace(".", "_")
    while getattr(into, name, value) is not value:
        name += "_"
    setattr(into, name, value)
    copy.target = name


def _inlined(
    into: fx.GraphModule, called: Subgraph, arguments: list[fx.Node], caller: fx.Node
) -> list[fx.Node]:
    """Append copies of a subgraph's operators to ``into``; return the copies of its results."""
    inner = called.module.graph
    copies: dict[fx.Node, Any] = dict(zip(placeholders(inner), arguments, strict=True))
    origin = caller.meta.get(ORIGIN, Origin())
    for node in inner.nodes:
        if node.op == "output":
            return [copies[value] for _, value in outputs(inner)]
        if node.op == "placeholder":
            continue
        copy = copies[node] = copy_node(into.graph, node, copies)
        if node.op == "get_attr":
            _set_constant(into, copy, f"{called.name}_{node.target}", called.module)
        elif ORIGIN in node.meta:
            inner_origin = node.meta[ORIGIN]
            inside = [
                f"{name}.{module}"
                for name in origin.modules[-1:] or ("",)
                for module in inner_origin.modules
            ]
            enclosing = (*origin.modules, *(module.removeprefix(".") for module in inside))
            copy.meta[ORIGIN] = dataclasses.replace(inner_origin, modules=enclosing)
    return []


def outline(module: fx.GraphModule) -> fx.GraphModule:
    """Move the operators between calls into new subgraphs, so that only calls and views remain.

    Args:
        module: a graph with calls; not changed.
    """
    return _Outlining(module).run()


class _Outlining:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._graph = fx.Graph()
        self._copies = {n: copy_placeholder(self._graph, n) for n in placeholders(module.graph)}
        self._run: list[fx.Node] = []
        self._parts = 0

    def run(self) -> fx.GraphModule:
        """Return the graph, with one call of a new subgraph for all operators between two calls."""
        for node in self._module.graph.nodes:
            reports = is_report(node)
            if SUBGRAPH in node.meta or reports:
                self._end_run()
            if subgraph_of(node) is not None or reports:
                self._copy(node)
            elif node.op not in {"placeholder", "output"}:
                self._run.append(node)
        self._end_run()
        set_outputs(self._graph, outputs(self._module.graph), self._copies)
        return module_like(self._module, self._graph, "outlined")

    def _copy(self, node: fx.Node) -> None:
        self._copies[node] = copy_node(self._graph, node, self._copies)

    def _end_run(self) -> None:
        """Move the operators since the last call into a subgraph, unless all are views or
        constants.
        """
        run, self._run = self._run, []
        if all(map(is_free, run)):
            for node in run:
                self._copy(node)
            return
        inside = set(run)
        operands_of_run = dict.fromkeys(
            o for n in run for o in n.all_input_nodes if o not in inside
        )
        arguments = [node for node in operands_of_run if not _is_sum(node)]
        totals = [node for node in operands_of_run if _is_sum(node)]
        results = [node for node in run if not inside.issuperset(node.users)]
        called = self._called(run, [*arguments, *totals], results)
        values = [node.meta["val"] for node in results]
        argument_copies, total_copies = (
            [self._copies[node] for node in group] for group in (arguments, totals)
        )
        items = call_subgraph(self._graph, called, argument_copies, values, total_copies)
        self._copies.update(zip(results, items, strict=True))

    def _called(
        self, run: Sequence[fx.Node], operands_of_run: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> Subgraph:
        graph = fx.Graph()
        copies = {node: _placeholder(graph, node) for node in operands_of_run}
        for node in run:
            copies[node] = copy_node(graph, node, copies)
        set_outputs(graph, [(Role(Kind.OUTPUT, node.name), node) for node in results], copies)
        self._parts += 1
        name = f"part_{self._parts}"
        return Subgraph(name, module_like(self._module, graph, name), {})


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a placeholder for a value of the calling graph. A computed value gets the role of an
    input: inputs are never overwritten, and the calling graph may still read the value.
    """
    role = role_of(node) if node.op == "placeholder" else Role(Kind.INPUT, f"%{node.name}")
    return add_placeholder(graph, node.name, node.meta["val"], role)


def _is_sum(node: fx.Node) -> bool:
    return is_input(node, Kind.ACCUMULATOR, Kind.WRITTEN)
