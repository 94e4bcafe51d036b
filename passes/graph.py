"""FX graphs whose inputs and outputs carry named roles. Every pass works on these.

| in ``node.meta`` | of | holds |
|---|---|---|
| ``"role"`` | a placeholder | its ``Role``; no pass counts positions |
| ``"roles"`` | the output node | a tuple, one ``Role`` for each returned value |
| ``"origin"`` | a node of a joint graph | its ``Origin``: modules, pass, checkpoint |

A graph may be traced for many sizes at once. ``concrete`` turns a symbolic size into a number
without a guard: comparing a symbolic size would specialize the graph to that one size.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.graph import dtype_abbrs  # type: ignore[attr-defined]

from .memory_policy import BALANCED, Memory, Price

SUBGRAPH = "subgraph"  # key in the ``meta`` of a node that calls a graph, see ``subgraph``


class Kind(enum.Enum):
    """The kind of a graph's input or output."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"  # gradient of an output, an input of the backward
    SAVED = "saved"  # passed from forward to the backward
    DEFERRED = "deferred"  # passed from backward_input to backward_weight
    ACCUMULATOR = "accumulator"  # sum of a parameter's gradients, written in place
    WRITTEN = "written"  # state that the backward writes, at its value when I or W runs
    REPORT = "report"  # a function that is called when accumulators are complete
    OUTPUT = "output"
    UPDATE = "update"  # new value of a mutated buffer or input
    INPUT_GRAD = "input_grad"
    PARAMETER_GRAD = "parameter_grad"
    BACKWARD_SUM = "backward_sum"  # new value of written state that only W reads
    BACKWARD_UPDATE = "backward_update"  # new value of other written state, which I writes

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs Python for each role


OWN_GRADIENT = "gradient_of_own_loss"
"""The name of a buffer with the gradient of a loss that the module itself has. What depends on the
buffer gets a gradient even if no output does.
"""
STATE = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.WRITTEN})
PRIMAL = STATE | {Kind.INPUT}
FORWARD_OUTPUT = frozenset({Kind.OUTPUT, Kind.UPDATE})
GRADIENT = frozenset({Kind.INPUT_GRAD, Kind.PARAMETER_GRAD})
BACKWARD_WRITE = frozenset({Kind.BACKWARD_SUM, Kind.BACKWARD_UPDATE})
WEIGHT_OUTPUT = frozenset({Kind.PARAMETER_GRAD, Kind.BACKWARD_SUM})


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """Meaning of an input or output of a graph: a kind and a name.

    The name is a parameter or buffer FQN, a user input or output path, or, for saved and
    deferred tensors, the name of the node that computes them (``partition/split_graphs.py``).
    """

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"


@dataclasses.dataclass(frozen=True)
class Region:
    """One of the graphs that a joint graph is divided into.

    Attributes:
        runs: nodes of the joint graph that this graph executes.
        live_ins: values that this graph reads and does not compute, in the joint graph's order.
        recomputed: nodes of ``runs`` that an earlier graph executes, too.
    """

    runs: set[fx.Node]
    live_ins: list[fx.Node] = dataclasses.field(default_factory=list)
    recomputed: frozenset[fx.Node] = frozenset()


@dataclasses.dataclass(frozen=True)
class Regions:
    """A joint graph divided into F, I and W.

    Attributes:
        backward: the fused backward.
        input: I.
        weight: W.
        early_weight_grads: weight gradients that I computes and returns.
        kept: parameters and buffers that W reads from the module, so that they are not saved.
        price: the price of the minimum cut.
        cuts: the nodes that cross the boundary after F, and the nodes that cross the boundary after
            I.
    """

    backward: Region
    input: Region
    weight: Region
    early_weight_grads: set[fx.Node]
    kept: set[fx.Node]
    price: Price
    cuts: tuple[set[fx.Node], set[fx.Node]]

    @property
    def saved(self) -> list[fx.Node]:
        """The tensors that F saves for the backward."""
        tensors = dict.fromkeys([*self.backward.live_ins, *self.input.live_ins])
        return [node for node in tensors if node not in self.kept]

    @property
    def deferred(self) -> list[fx.Node]:
        """The tensors that I defers to W."""
        return [node for node in self.weight.live_ins if node not in self.kept]


@dataclasses.dataclass(eq=False)
class SplitGraphs:
    """The joint graph of one module, and the graphs into which passes split it.

    A pass fills in or rewrites fields. ``backward`` is the fused backward; an engine calls it if I
    and W would run back to back. All three backward graphs are None for a module traced without
    gradients. ``memory`` is the setting by which the boundaries are chosen, and ``regions`` the
    chosen division.
    """

    joint: fx.GraphModule
    memory: Memory = BALANCED
    regions: Regions | None = None
    forward: fx.GraphModule = None  # type: ignore[assignment]  # until a pass fills it in
    backward: fx.GraphModule | None = None
    backward_input: fx.GraphModule | None = None
    backward_weight: fx.GraphModule | None = None

    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs that exist so far, by name, in the order of their creation."""
        return {n: module for n, module in vars(self).items() if isinstance(module, fx.GraphModule)}


def module_like(module: fx.GraphModule, graph: fx.Graph, name: str) -> fx.GraphModule:
    """Wrap a graph in a module of the class of ``module``, with the constants of ``module``. The
    class is kept because a lazy graph module generates Python code only on demand.
    """
    kind: Any = type(module).__base__  # torch gives each module its own subclass
    result: fx.GraphModule = kind(module, graph, class_name=name)
    return result


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def add_placeholder(graph: fx.Graph, name: str, value: Any, role: Role) -> fx.Node:
    """Add a placeholder for values like the fake tensor ``value``."""
    node = graph.placeholder(name)
    node.target = node.name  # fx adds a number to a name that exists already
    node.meta = {"val": value, "role": role}
    return node


def copy_placeholder(graph: fx.Graph, node: fx.Node, role: Role | None = None) -> fx.Node:
    """Add a placeholder for a node's value, with ``role`` or, by default, the node's role."""
    copy = add_placeholder(graph, node.name, node.meta.get("val"), role or role_of(node))
    copy.meta = node.meta | copy.meta
    return copy


def add_call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add a call of an operator, without torch's slow search of its arguments for bare symbols."""
    node = graph.call_function(target)
    node.args = args
    return node


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any]) -> fx.Node:
    """Add a copy of a node of another graph, without torch's slow search, see ``add_call``.

    Args:
        graph: the graph.
        node: the node.
        copies: maps the operands of ``node`` to nodes of ``graph``.
    """
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    copy.args = fx.node.map_arg(node.args, copies.__getitem__)
    if node.kwargs:
        copy.kwargs = fx.node.map_arg(node.kwargs, copies.__getitem__)
    copy.meta.update(node.meta)
    return copy


def copy_nodes(graph: fx.Graph, module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Add copies of all nodes of a module's graph but the output; return a map to the copies."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output":
            copies[node] = copy_node(graph, node, copies)
    return copies


def role_of(node: fx.Node) -> Role:
    """The role of a placeholder."""
    role = node.meta["role"]
    if not isinstance(role, Role):
        raise TypeError(
            f"node.meta['role'] of placeholder {node.name} must be a Role, not {role!r}"
        )
    return role


def is_input(node: fx.Node, *kinds: Kind) -> bool:
    """Whether the node is a placeholder of one of these kinds."""
    return node.op == "placeholder" and role_of(node).kind in kinds


def is_state(node: fx.Node) -> bool:
    """Whether the node is a parameter or a buffer of the module."""
    return is_input(node, *STATE)


def inputs(graph: fx.Graph, *kinds: Kind) -> dict[Role, fx.Node]:
    """Placeholders by role, in order; with ``kinds``, only placeholders of these kinds."""
    pairs = ((role_of(node), node) for node in placeholders(graph))
    return {role: node for role, node in pairs if not kinds or role.kind in kinds}


def own_gradients(graph: fx.Graph) -> dict[Role, fx.Node]:
    """The placeholders of buffers ``OWN_GRADIENT`` by role."""
    buffers = inputs(graph, Kind.BUFFER).items()
    return {role: node for role, node in buffers if role.name.endswith(OWN_GRADIENT)}


def outputs(graph: fx.Graph, *kinds: Kind) -> list[tuple[Role, Any]]:
    """(role, value) of every returned value, in order; a value is a Node or a constant."""
    node = graph.output_node()
    pairs = zip(node.meta["roles"], node.args[0], strict=True)  # type: ignore[arg-type]
    return [(role, value) for role, value in pairs if not kinds or role.kind in kinds]


def computed_outputs(graph: fx.Graph, *kinds: Kind) -> list[tuple[Role, fx.Node]]:
    """(role, node) of every returned value that is not a constant, in order."""
    return [(role, value) for role, value in outputs(graph, *kinds) if isinstance(value, fx.Node)]


def set_outputs(
    graph: fx.Graph, pairs: Sequence[tuple[Role, Any]], copies: Mapping[fx.Node, Any]
) -> None:
    """Append an output node that returns values as a list, with their roles.

    Args:
        graph: the graph.
        pairs: roles, and values of another graph.
        copies: maps values of the other graph to nodes of ``graph``.
    """
    values: Any = [value for _, value in pairs]
    node = graph.output(fx.node.map_arg(values, copies.__getitem__))
    node.meta["roles"] = tuple(role for role, _ in pairs)


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that call a function. Placeholders, attributes and the output are left out."""
    return (node for node in graph.nodes if node.op == "call_function")


def is_like(node: Any, other: fx.Node) -> bool:
    """Whether both nodes are tensors of one shape and dtype, without symbolic sizes."""
    value, expected = (
        tensor_of(operand) if isinstance(operand, fx.Node) else None for operand in (node, other)
    )
    if value is None or expected is None or not (is_fixed(value) and is_fixed(expected)):
        return False
    return (value.shape, value.dtype) == (expected.shape, expected.dtype)


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node, or None if its value is not a tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def reachable(
    roots: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """The roots, their neighbours, the neighbours of these, and so on.

    Args:
        roots: the nodes to start from.
        neighbours: returns the neighbours of a node, such as its inputs.
    """
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(neighbours(node))
    return seen


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and all nodes that they depend on."""
    return reachable(roots, attrgetter("all_input_nodes"))


def descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and all nodes that depend on them, without the output node."""
    return reachable(roots, lambda node: [user for user in node.users if user.op != "output"])


def value_text(value: object) -> str:
    """The text of a node's value: ``f32[2, 3]`` for a tensor, ``str(value)`` for a number. The
    items of a tuple or list are in parentheses.
    """
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"{dtype_abbrs.get(value.dtype, str(value.dtype))}[{shape}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(value_text(item) for item in value) + ")"
    return str(value)


def source_line(node: fx.Node) -> str:
    """``file:line code`` of the user's statement that made the node, or an empty string."""
    return _user_line(node.meta.get("stack_trace") or "")


def from_source_line(node: fx.Node) -> str:
    """Text for errors, such as `` (from file:line code)``; empty without a source line."""
    line = source_line(node)
    return f" (from {line})" if line else ""


# Files whose frames stand between the user's statement and the operator: under a default device,
# and where a call of the user's goes through one of ours.
_WRAPPERS = "torch/utils/_device.py", "autosplit/capture/workarounds/"


@functools.lru_cache(maxsize=1024)  # layers repeat the lines of one
def _user_line(trace: str) -> str:
    lines = [line.strip() for line in trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith('File "') and not any(w in lines[index] for w in _WRAPPERS):
            path, line, *_ = lines[index].removeprefix('File "').split('", line ')[0:2]
            number = line.split(",")[0]
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{path}:{number} {code}".strip()
    return ""


ORIGIN = "origin"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a node, as capture recorded it.

    Attributes:
        modules: names of the modules around the user's statement, outermost first; for a
            derivative, those of the forward's statement. A later call of a module has a number, as
            in ``block@1``.
        is_backward: whether the backward was being traced; None if unknown.
        recomputed: whether the user asked for the node to be recomputed
            (``torch.utils.checkpoint``).
        checkpoint: the number of the call of ``checkpoint`` around the node.
    """

    modules: tuple[str, ...] = ()
    is_backward: bool | None = None
    recomputed: bool = False
    checkpoint: int | None = None


_NOWHERE = Origin()


def origin_of(node: fx.Node) -> Origin:
    """The origin of a node; an empty one if capture recorded none."""
    origin = node.meta.get(ORIGIN, _NOWHERE)
    if not isinstance(origin, Origin):
        raise TypeError(
            f"node.meta[{ORIGIN!r}] of node {node.name} must be an Origin, not {origin!r}"
        )
    return origin


_UNKNOWN_SIZE = 4096  # stands for a size that depends on data, such as a count of nonzeros


def concrete(size: int | torch.SymInt) -> int:
    """The size as a number; a symbolic one has the value of the example inputs."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    if symbolic_shapes.free_unbacked_symbols(size):
        return _UNKNOWN_SIZE
    renamed = hasattr(symbolic_shapes, "optimization_hint")  # not in torch 2.11
    hint = getattr(symbolic_shapes, "optimization_hint" if renamed else "size_hint")
    return int(hint(size))


def is_fixed(tensor: torch.Tensor) -> bool:
    """Whether no size is symbolic, so that shapes may be compared."""
    sizes: Sequence[int | torch.SymInt] = tensor.shape
    return not any(isinstance(size, torch.SymInt) for size in sizes)


NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Symbolic numbers: computed from sizes, or read from data (``tensor.item()``)."""


def is_size(node: fx.Node) -> bool:
    """Whether the node yields a symbolic number."""
    return isinstance(node.meta.get("val"), NUMBERS)


def with_concrete_sizes(value: Any, size: Callable[[Any], int]) -> Any:
    """Replace symbolic sizes in a value, also inside containers. A tensor becomes a tensor without
    data and with concrete sizes. A symbolic number becomes a plain number. Other values stay as
    they are.

    Args:
        value: the value of a node.
        size: returns the number for a symbolic one.
    """
    match value:
        case torch.Tensor():
            if is_fixed(value):
                return value
            sizes = [size(length) for length in value.shape]
            return torch.empty(sizes, dtype=value.dtype, device="meta")
        case torch.SymInt():
            return size(value)
        case torch.SymFloat() | torch.SymBool():
            return 0  # no count depends on it
        case list() | tuple():
            return type(value)(with_concrete_sizes(item, size) for item in value)
    return value
