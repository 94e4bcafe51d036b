"""``Subgraph``: a graph that nodes of other graphs call, each with values of its own.

Layers of one kind have the same F, I and W. A graph around them has one node a call of such a
graph: an operator that takes and returns a list of tensors, with the graph noted in its ``meta``.
Passes see an operator that they do not know, which is not done twice nor moved against its data.
``inline`` puts the graphs' own operators in place of the calls.

Outlining: what stands between the calls of a graph becomes graphs that are called as well.

A compiler that takes seconds is then given each kind of block once, and what is around them once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .analysis.aliasing import is_free, storage_root
from .analysis.operator_cost import duration
from .analysis.operators import is_random
from .graph import (
    ORIGIN,
    SUBGRAPH,
    Kind,
    Origin,
    Role,
    SplitGraphs,
    calls,
    copy_placeholder,
    inputs,
    module_like,
    outputs,
    placeholders,
    role_of,
    set_outputs,
)

# Never run: a graph that calls others is compiled into calls of their code.
_LIBRARY = torch.library.Library("autosplit", "DEF")
_LIBRARY.define("subgraph(str name, Tensor[] given) -> Tensor[]")
_LIBRARY.define(
    "drawing_subgraph(str name, Tensor[] given) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define("adding_subgraph(str name, Tensor[] given, Tensor(a!)[] sums) -> Tensor[]")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Subgraph:
    """A graph that is called by nodes.

    Attributes:
        name: of the graph, unique among those that one graph calls.
        module: the graph; returns what it computes, each value once.
        results: role of a result -> its place among what the graph returns, or for one that the
            graph only passes on the role that it came in under; others are constants.
    """

    name: str
    module: fx.GraphModule
    results: Mapping[Role, int | Role]

    @classmethod
    def of(cls, name: str, module: fx.GraphModule) -> Subgraph:
        """A graph with roles, as one that is called.

        Args:
            name: for the called graph.
            module: the graph; not changed.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(module.graph, copies)
        places: dict[fx.Node, int] = {}
        results: dict[Role, int | Role] = {}
        pairs: list[tuple[Role, fx.Node]] = []
        for role, value in outputs(module.graph):
            if not isinstance(value, fx.Node):
                continue
            if value.op == "placeholder":
                results[role] = role_of(value)
                continue
            if value not in places:
                places[value] = len(pairs)
                pairs.append((role, value))
            results[role] = places[value]
        set_outputs(graph, pairs, copies)
        return cls(name, module_like(module, graph, name), results)

    @functools.cached_property
    def given(self) -> list[Role]:
        """Roles of what the graph takes, in order."""
        return list(inputs(self.module.graph))

    @functools.cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(map(is_random, inner_calls(self.module.graph)))

    @functools.cached_property
    def duration(self) -> float:
        """The estimated time of all its operators."""
        return sum(map(duration, calls(self.module.graph)))

    @functools.cached_property
    def read_by(self) -> list[list[int]]:
        """For each result, which of what the graph takes it is computed from."""
        taken = placeholders(self.module.graph)
        bits = reached(self.module.graph, taken)
        found = (bits[value] for _, value in outputs(self.module.graph))
        return [[at for at in range(len(taken)) if read >> at & 1] for read in found]

    @functools.cached_property
    def lies_in(self) -> list[tuple[bool, int] | None]:
        """For each result, what else its memory belongs to, where that is not its own: whether to
        an earlier result, and the place of that, or of what the graph takes.
        """
        owners = {node: (False, at) for at, node in enumerate(placeholders(self.module.graph))}
        found: list[tuple[bool, int] | None] = []
        for at, (_, value) in enumerate(outputs(self.module.graph)):
            root = storage_root(value)
            found.append(owners.get(root))
            owners.setdefault(root, (True, at))
        return found

    @functools.cached_property
    def values(self) -> list[torch.Tensor]:
        """Fake tensors like those that the graph returns."""
        return [value.meta["val"] for _, value in outputs(self.module.graph)]


def call_subgraph(
    graph: fx.Graph,
    called: Subgraph,
    given: list[fx.Node],
    values: list[torch.Tensor],
    sums: Sequence[fx.Node] = (),
) -> list[fx.Node]:
    """Add a call of a graph; returns the nodes of its results.

    Args:
        graph: to add to, where it inserts nodes.
        called: the graph.
        given: what it takes.
        values: fake tensors like its results.
        sums: what it takes after that, and adds to.
    """
    if not values and not sums:
        return []
    operators = torch.ops.autosplit
    if sums:
        target = operators.adding_subgraph
    else:
        target = operators.drawing_subgraph if called.draws else operators.subgraph
    lists = (given, list(sums)) if sums else (given,)
    node = graph.call_function(target.default, (called.name, *lists))
    node.meta = {"val": values, SUBGRAPH: called}
    found = []
    for at, value in enumerate(values):
        item = graph.call_function(operator.getitem, (node, at))
        item.meta = {"val": value}
        found.append(item)
    return found


def subgraph_of(node: fx.Node) -> Subgraph | None:
    """The graph that a node calls, behind items picked from its results."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    found: Subgraph | None = node.meta.get(SUBGRAPH) if node.op == "call_function" else None
    return found


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node's value is computed from; behind the call of a graph, those that this
    result of it is.
    """
    called = subgraph_of(node)
    if called is None or node.target is not operator.getitem:
        return node.all_input_nodes
    call, place = node.args
    given = operands(call)  # type: ignore[arg-type]
    return [given[at] for at in called.read_by[place]]  # type: ignore[index]


def reached(graph: fx.Graph, starts: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Which of some nodes each node depends on, as bits in their order: a walk from each would
    take the square of the graph where every layer returns something, as those with a cache do.
    """
    bits = {node: 1 << at for at, node in enumerate(starts)}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        own = bits.get(node, 0)
        for operand in sources(node):
            own |= found[operand]
        found[node] = own
    return found


def operands(node: fx.Node) -> list[fx.Node]:
    """The values that a node hands to the graph that it calls."""
    lists: Any = node.args[1:]
    return [operand for given in lists for operand in given]


def sums(node: fx.Node) -> list[fx.Node]:
    """The values that the graph that a node calls adds to."""
    return list(node.args[2]) if SUBGRAPH in node.meta and len(node.args) > 2 else []  # type: ignore[arg-type]


def subgraphs(graph: fx.Graph) -> list[Subgraph]:
    """The graphs that the nodes of a graph call, each once."""
    found = (subgraph_of(node) for node in calls(graph))
    return list(dict.fromkeys(each for each in found if each is not None))


def inner_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that compute something, those of called graphs in place of their calls."""
    for node in calls(graph):
        called = node.meta.get(SUBGRAPH)
        if called is None:
            yield node
        else:
            yield from inner_calls(called.module.graph)


def inlined(graphs: SplitGraphs) -> SplitGraphs:
    """Graphs with the operators of those that they call."""
    made: dict[str, Any] = {name: inline(module) for name, module in graphs.graphs().items()}
    return dataclasses.replace(graphs, **made)


def inline(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with the operators of the graphs that it calls; itself where it calls none."""
    if not subgraphs(module.graph):
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    made = module_like(module, graph, type(module).__name__)
    for node in module.graph.nodes:
        called = node.meta.get(SUBGRAPH)
        if called is not None:
            given = [copies[each] for each in operands(node)]
            copies[node] = _inlined(made, called, given, node)
        elif node.target is operator.getitem and isinstance(copies.get(node.args[0]), list):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op == "output":
            set_outputs(graph, outputs(module.graph), copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    made.graph = graph
    return made


def _inlined(
    into: fx.GraphModule, called: Subgraph, given: list[fx.Node], caller: fx.Node
) -> list[fx.Node]:
    """Copies of a called graph's operators, at the end of a graph; returns its results."""
    inner = called.module.graph
    copies: dict[fx.Node, Any] = dict(zip(placeholders(inner), given, strict=True))
    origin = caller.meta.get(ORIGIN, Origin())
    for node in inner.nodes:
        if node.op == "output":
            return [copies[value] for _, value in outputs(inner)]
        if node.op == "placeholder":
            continue
        copy = copies[node] = into.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copy.target = f"{called.name}_{node.target}"
            setattr(into, copy.target, operator.attrgetter(str(node.target))(called.module))
        elif ORIGIN in node.meta:
            own = node.meta[ORIGIN]
            inside = [
                f"{name}.{each}" for name in origin.modules[-1:] or ("",) for each in own.modules
            ]
            around = (*origin.modules, *(each.removeprefix(".") for each in inside))
            copy.meta[ORIGIN] = dataclasses.replace(own, modules=around)
    return []


def outline(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that calls graphs and makes views, and does nothing else.

    Args:
        module: a graph that calls others; not changed.
    """
    return _Outlining(module).run()


class _Outlining:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._graph = fx.Graph()
        self._copies = {n: copy_placeholder(self._graph, n) for n in placeholders(module.graph)}
        self._run: list[fx.Node] = []
        self._made = 0

    def run(self) -> fx.GraphModule:
        for node in self._module.graph.nodes:
            if SUBGRAPH in node.meta:
                self._end_run()
            if subgraph_of(node) is not None:
                self._copy(node)
            elif node.op not in {"placeholder", "output"}:
                self._run.append(node)
        self._end_run()
        set_outputs(self._graph, outputs(self._module.graph), self._copies)
        return module_like(self._module, self._graph, "outlined")

    def _copy(self, node: fx.Node) -> None:
        self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)

    def _end_run(self) -> None:
        """Have the operators since the last call be a graph, or themselves if all are free."""
        run, self._run = self._run, []
        if all(map(is_free, run)):
            for node in run:
                self._copy(node)
            return
        inside = set(run)
        taken = dict.fromkeys(o for n in run for o in n.all_input_nodes if o not in inside)
        given = [node for node in taken if not _is_sum(node)]
        totals = [node for node in taken if _is_sum(node)]
        results = [node for node in run if not inside.issuperset(node.users)]
        called = self._called(run, [*given, *totals], results)
        values = [node.meta["val"] for node in results]
        before, into = ([self._copies[node] for node in each] for each in (given, totals))
        made = call_subgraph(self._graph, called, before, values, into)
        self._copies.update(zip(results, made, strict=True))

    def _called(
        self, run: Sequence[fx.Node], taken: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> Subgraph:
        graph = fx.Graph()
        copies = {node: _placeholder(graph, node) for node in taken}
        for node in run:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        set_outputs(graph, [(Role(Kind.OUTPUT, node.name), node) for node in results], copies)
        self._made += 1
        name = f"part_{self._made}"
        return Subgraph(name, module_like(self._module, graph, name), {})


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """One for a value; what may be written over around may be read behind."""
    copy = graph.placeholder(node.name)
    copy.target = copy.name
    role = role_of(node) if node.op == "placeholder" else Role(Kind.INPUT, f"%{node.name}")
    copy.meta = {"val": node.meta["val"], "role": role}
    return copy


def _is_sum(node: fx.Node) -> bool:
    return node.op == "placeholder" and role_of(node).kind is Kind.ACCUMULATOR
