"""Invariants of split graphs, listed in tables. All violations are collected and raised at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx

from .analysis.aliasing import is_view, storage_root
from .analysis.operator_cost import recompute_cost
from .analysis.operators import (
    is_accumulation,
    is_attention,
    is_check,
    is_effect,
    is_random,
    is_recomputed,
    is_report,
    writes_in_backward,
)
from .errors import PassError
from .graph import (
    BACKWARD_WRITE,
    FORWARD_OUTPUT,
    GRADIENT,
    PRIMAL,
    STATE,
    WEIGHT_OUTPUT,
    Kind,
    SplitGraphs,
    calls,
    from_source_line,
    inputs,
    is_input,
    is_size,
    outputs,
    role_of,
    tensor_of,
)
from .subgraph import subgraphs, sums

# The kinds of inputs of each graph. Other invariants follow: backward_input never depends on
# backward_weight, because no kind that W returns may enter I.
_MAY_ENTER = {
    "joint": PRIMAL | {Kind.TANGENT},
    "forward": PRIMAL,
    "backward": STATE | {Kind.SAVED, Kind.TANGENT},
    "backward_input": STATE | {Kind.SAVED, Kind.TANGENT},
    "backward_weight": STATE | {Kind.DEFERRED},
}
_MAY_LEAVE = {
    "joint": FORWARD_OUTPUT | GRADIENT | BACKWARD_WRITE,
    "forward": FORWARD_OUTPUT | {Kind.SAVED},
    "backward": GRADIENT | BACKWARD_WRITE,
    "backward_input": GRADIENT | BACKWARD_WRITE | {Kind.DEFERRED},
    "backward_weight": WEIGHT_OUTPUT,
}
_MAY_ENTER["backward_slice"] = _MAY_ENTER["backward"]
_MAY_LEAVE["backward_slice"] = _MAY_LEAVE["backward"] | {Kind.SAVED}
for _name in [name for name in _MAY_ENTER if name.startswith("backward")]:
    _MAY_ENTER[f"{_name}_accumulating"] = _MAY_ENTER[_name] | {
        Kind.ACCUMULATOR,
        Kind.REPORT,
    }
    _MAY_LEAVE[f"{_name}_accumulating"] = _MAY_LEAVE[_name] - {Kind.PARAMETER_GRAD}


_NUMBER = re.compile(r"(?<=_slice)_\d+$")


def verify(program: SplitGraphs, after: str = "the pipeline") -> None:
    """Check every invariant on every graph that exists.

    Args:
        program: the program to check.
        after: name of the pass that ran last, for the error text.

    Raises:
        PassError: lists every violation with its graph, node and source line.
    """
    violations = [
        line for name, module in program.graphs().items() for line in _check(name, module)
    ]
    violations += [line for check in BETWEEN_GRAPHS for line in check(program)]
    _refuse(violations, after)


def verify_graph(name: str, module: fx.GraphModule, after: str) -> None:
    """Check every invariant of one graph, such as a form of W made from a verified program.

    Args:
        name: the graph's name.
        module: the graph.
        after: name of the pass that ran last, for the error text.

    Raises:
        PassError: lists every violation with its node and source line.
    """
    _refuse(list(_check(name, module)), after)


def _check(name: str, module: fx.GraphModule) -> Iterator[str]:
    return (line for check in OF_A_GRAPH for line in check(name, module))


def _refuse(violations: list[str], after: str) -> None:
    if violations:
        raise PassError(f"after {after}:\n" + "\n".join(f"  - {line}" for line in violations))


def _lint(name: str, module: fx.GraphModule) -> Iterator[str]:
    try:
        module.graph.lint()
    except RuntimeError as error:
        yield f"{name}: {error}"


def _values_known(name: str, module: fx.GraphModule) -> Iterator[str]:
    for node in calls(module.graph):
        if "val" not in node.meta and not is_effect(node):
            yield _at(name, node, "has no meta['val']")


def _roles_allowed(name: str, module: fx.GraphModule) -> Iterator[str]:
    name = _NUMBER.sub("", name)
    for role, node in inputs(module.graph).items():
        if role.kind not in _MAY_ENTER[name]:
            yield _at(name, node, f"{role} must not enter this graph")
    for role, _ in outputs(module.graph):
        if role.kind not in _MAY_LEAVE[name]:
            yield f"{name}: {role} must not leave this graph"


def _backward_is_pure(name: str, module: fx.GraphModule) -> Iterator[str]:
    if not name.startswith("backward"):
        return
    for node in calls(module.graph):
        if is_random(node):
            yield _at(name, node, f"{node.target} may draw random numbers in a backward")
        elif is_attention(node) and not is_recomputed(node):
            yield _at(name, node, f"{node.target} runs attention's forward in a backward")
        elif is_check(node) or is_report(node):
            continue
        elif is_effect(node) and not _only_adds(node) and not _writes_state(node):
            yield _at(name, node, f"{node.target} has a side effect in a backward")


def _nothing_writes_in_backward(name: str, module: fx.GraphModule) -> Iterator[str]:
    for node in calls(module.graph):
        if name == "joint" and writes_in_backward(node):
            yield _at(name, node, "the backward writes, and its graphs would not")


def _accumulators_only_grow(name: str, module: fx.GraphModule) -> Iterator[str]:
    """Each accumulator is added to, and nothing reads it, because it also holds other microbatches'
    gradients.
    """
    accumulators = inputs(module.graph, Kind.ACCUMULATOR)
    if not accumulators:
        return
    written = {storage_root(into) for node in calls(module.graph) for into in _adds_into(node)}
    for role, accumulator in accumulators.items():
        if accumulator not in written:
            yield _at(name, accumulator, f"nothing is added into {role}")
    for node in calls(module.graph):
        read = [] if is_view(node) else _nodes_in((node.args, node.kwargs))
        for into in _adds_into(node):
            read.remove(into)
        for operand in read:
            if _is_accumulator(storage_root(operand)):
                yield _at(name, node, f"reads {role_of(storage_root(operand))}")


def _called_graphs_add(name: str, module: fx.GraphModule) -> Iterator[str]:
    for called in subgraphs(module.graph):
        if inputs(called.module.graph, Kind.ACCUMULATOR):
            yield from _check("backward_weight_accumulating", called.module)


def _adds_into(node: fx.Node) -> list[fx.Node]:
    """The accumulators to which a node adds."""
    return sums(node) or [operand for operand in node.args[:1] if is_accumulation(node)]  # type: ignore[misc]


def _only_adds(node: fx.Node) -> bool:
    into = _adds_into(node)
    return bool(into) and all(_is_accumulator(storage_root(accumulator)) for accumulator in into)


def _writes_state(node: fx.Node) -> bool:
    """Whether the node adds to state that the backward writes, or replaces its value."""
    into: Any = node.args[0] if is_accumulation(node) else None
    return into is not None and is_input(into, Kind.WRITTEN)


def _is_accumulator(node: fx.Node) -> bool:
    return is_input(node, Kind.ACCUMULATOR)


def _nodes_in(arguments: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(arguments, nodes.append)
    return nodes


def _boundaries_match(program: SplitGraphs) -> Iterator[str]:
    pairs = (
        ("forward", "backward", Kind.SAVED),
        ("backward_input", "backward_weight", Kind.DEFERRED),
    )
    graphs = program.graphs()
    for giver, taker, kind in pairs:
        if giver not in graphs or taker not in graphs:
            continue
        returned = [role for role, _ in outputs(graphs[giver].graph, kind)]
        accepted = list(inputs(graphs[taker].graph, kind))
        if sorted(map(str, returned)) != sorted(map(str, accepted)):
            yield f"{giver} returns {kind.value} {returned}, {taker} takes {accepted}"
        for role, value in outputs(graphs[giver].graph, kind):
            if not isinstance(value, fx.Node) or not (
                is_size(value) or tensor_of(value) is not None
            ):
                yield f"{giver}: {role} is {value!r}; boundaries carry tensors or numbers only"


def _outputs_once(program: SplitGraphs) -> Iterator[str]:
    if program.backward_weight is None and program.backward is not None:
        return
    halves = ("forward", "backward_input", "backward_weight")
    parts = [module for name, module in program.graphs().items() if name in halves]
    if not parts:
        return
    kept = FORWARD_OUTPUT | GRADIENT | BACKWARD_WRITE
    wanted = Counter(role for role, _ in outputs(program.joint.graph, *kept))
    actual = Counter(role for part in parts for role, _ in outputs(part.graph, *kept))
    for role in wanted | actual:
        if wanted[role] != actual[role]:
            yield f"{role} is returned {actual[role]} times over the graphs, not {wanted[role]}"


def _results_match_the_joint_graph(program: SplitGraphs) -> Iterator[str]:
    """A result has the shape and dtype that it has in the joint graph."""

    def value_of(value: object) -> Tensor | None:
        return tensor_of(value) if isinstance(value, fx.Node) else None

    def form(tensor: Tensor | None) -> object:
        return tensor is not None and (tensor.dtype, *map(str, tensor.shape))

    kinds = FORWARD_OUTPUT | GRADIENT | BACKWARD_WRITE
    traced = {role: value_of(value) for role, value in outputs(program.joint.graph, *kinds)}
    for name, module in program.graphs().items():
        for role, value in outputs(module.graph, *kinds):
            tensor, expected = value_of(value), traced.get(role, value_of(value))
            if tensor is not expected and form(tensor) != form(expected):
                yield f"{name}: {role} is {form(tensor)}, and was traced as {form(expected)}"


def _only_cheap_work_runs_again(program: SplitGraphs) -> Iterator[str]:
    """Only cheap operators run in two graphs. Copies of a node are recognized by its name."""
    ran: dict[str, str] = {}
    for name in ("forward", "backward_input", "backward_weight"):
        module = program.graphs().get(name)
        for node in () if module is None else calls(module.graph):
            first = ran.setdefault(node.name, name)
            if first != name and recompute_cost(node) is None and not is_recomputed(node):
                yield _at(name, node, f"{node.target} ran in {first} and runs again")


def _at(graph: str, node: fx.Node, problem: str) -> str:
    return f"{graph}: {node.name}: {problem}{from_source_line(node)}"


OF_A_GRAPH: tuple[Callable[[str, fx.GraphModule], Iterator[str]], ...] = (
    _lint,
    _values_known,
    _roles_allowed,
    _backward_is_pure,
    _nothing_writes_in_backward,
    _accumulators_only_grow,
    _called_graphs_add,
)
BETWEEN_GRAPHS: tuple[Callable[[SplitGraphs], Iterator[str]], ...] = (
    _boundaries_match,
    _outputs_once,
    _results_match_the_joint_graph,
    _only_cheap_work_runs_again,
)
