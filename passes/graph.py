"""FX graphs whose inputs and outputs carry named roles: what a pass works on.

No pass counts positions. A placeholder's role is in ``node.meta["role"]``; the output
node's roles are a tuple in ``node.meta["roles"]``, one for each returned value.

Where a node of a joint graph comes from, as capture noted it in ``node.meta["origin"]``.

Symbolic sizes as concrete numbers, without guards.

A graph may be traced for many sizes at once. Prices and counts need one number each; comparing
a symbolic size would add a guard and specialize the graph to that one size.
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

from .memory_policy import BALANCED, Memory, Price

SUBGRAPH = "subgraph"  # in the ``meta`` of a node that calls a graph: that, see ``subgraph``


class Kind(enum.Enum):
    """What a graph's input or output stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"  # gradient of an output, an input of the backward
    SAVED = "saved"  # left by forward for the backward
    DEFERRED = "deferred"  # left by backward_input for backward_weight
    ACCUMULATOR = "accumulator"  # sum of a parameter's gradients, written in place
    OUTPUT = "output"
    UPDATE = "update"  # new value of a mutated buffer or input
    INPUT_GRAD = "input_grad"
    PARAMETER_GRAD = "parameter_grad"


STATE = frozenset({Kind.PARAMETER, Kind.BUFFER})
PRIMAL = STATE | {Kind.INPUT}
FORWARD_OUTPUT = frozenset({Kind.OUTPUT, Kind.UPDATE})
GRADIENT = frozenset({Kind.INPUT_GRAD, Kind.PARAMETER_GRAD})


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """A kind and the user's name for the thing.

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
        runs: nodes of the joint graph that it executes.
        takes: its live-ins, values that it reads and does not compute, in graph order.
    """

    runs: set[fx.Node]
    takes: list[fx.Node]


@dataclasses.dataclass(frozen=True)
class Regions:
    """A joint graph divided into F, I and W.

    Attributes:
        backward: the unsplit backward.
        input: I.
        weight: W.
        released: weight gradients that I computes and returns.
        kept: parameters and buffers, which W reads from the module and nobody saves.
        price: of the minimum cut.
        cuts: what crosses the boundary behind F, and that behind I, of all that could.
        gradient: what depends on the gradient of an output.
        urgent: what I must compute, see ``Reachability``.
    """

    backward: Region
    input: Region
    weight: Region
    released: set[fx.Node]
    kept: set[fx.Node]
    price: Price
    cuts: tuple[set[fx.Node], set[fx.Node]]
    gradient: set[fx.Node]
    urgent: set[fx.Node]

    @property
    def saved(self) -> list[fx.Node]:
        """The tensors that F saves for the backward."""
        taken = dict.fromkeys([*self.backward.takes, *self.input.takes])
        return [node for node in taken if node not in self.kept]

    @property
    def deferred(self) -> list[fx.Node]:
        """The tensors that I defers to W."""
        return [node for node in self.weight.takes if node not in self.kept]


@dataclasses.dataclass(eq=False)
class SplitGraphs:
    """The graphs of one module: what passes split a joint graph into.

    A pass fills in or rewrites fields. ``backward`` is the unsplit backward; it stays beside
    its two halves because an engine that runs I and W back to back calls it instead. It and the
    halves are None for a module traced without gradients. ``memory`` is the policy for the
    boundaries; ``regions`` are the division under it.
    """

    joint: fx.GraphModule
    memory: Memory = BALANCED
    regions: Regions | None = None
    forward: fx.GraphModule = None  # type: ignore[assignment]  # until a pass has made it
    backward: fx.GraphModule | None = None
    backward_input: fx.GraphModule | None = None
    backward_weight: fx.GraphModule | None = None

    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs that exist so far, by name, in the order in which they are made."""
        return {n: each for n, each in vars(self).items() if isinstance(each, fx.GraphModule)}


def module_like(module: fx.GraphModule, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A graph as a module of the same class, with the constants of that module: one that writes
    its graph as Python code only where somebody asks makes another such.
    """
    kind: Any = type(module).__base__  # torch makes each a class of its own
    made: fx.GraphModule = kind(module, graph, class_name=name)
    return made


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def copy_placeholder(graph: fx.Graph, node: fx.Node, role: Role | None = None) -> fx.Node:
    """A placeholder for a node's value; under the node's own role where none is given."""
    copy = graph.placeholder(node.name)
    copy.target = copy.name  # where the name was taken, it got a number
    copy.meta = {**node.meta, "role": role or role_of(node)}
    return copy


def output_node(graph: fx.Graph) -> fx.Node:
    return graph.output_node()


def role_of(node: fx.Node) -> Role:
    """The role of a placeholder."""
    role = node.meta["role"]
    if not isinstance(role, Role):
        raise TypeError(f"placeholder {node.name} carries {role!r}, expected a Role")
    return role


def is_state(node: fx.Node) -> bool:
    """Whether the node is a parameter or a buffer of the module."""
    return node.op == "placeholder" and role_of(node).kind in STATE


def inputs(graph: fx.Graph, *kinds: Kind) -> dict[Role, fx.Node]:
    """Placeholders by role, in order; only of the given kinds where kinds are given."""
    found = {role_of(node): node for node in placeholders(graph)}
    return {role: node for role, node in found.items() if not kinds or role.kind in kinds}


def outputs(graph: fx.Graph, *kinds: Kind) -> list[tuple[Role, Any]]:
    """(role, value) of every returned value, in order; a value is a Node or a constant."""
    node = output_node(graph)
    pairs = zip(node.meta["roles"], node.args[0], strict=True)  # type: ignore[arg-type]
    return [(role, value) for role, value in pairs if not kinds or role.kind in kinds]


def set_outputs(
    graph: fx.Graph, pairs: Sequence[tuple[Role, Any]], copies: Mapping[fx.Node, Any] | None = None
) -> None:
    """Append an output node that returns the values as a list, with their roles; what the graph has
    in place of them where they are another's.
    """
    values: Any = [value for _, value in pairs]
    node = graph.output(values if copies is None else fx.node.map_arg(values, copies.__getitem__))
    node.meta["roles"] = tuple(role for role, _ in pairs)


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that compute something."""
    return (node for node in graph.nodes if node.op == "call_function")


def is_like(node: Any, other: fx.Node) -> bool:
    """Whether both are tensors of one shape and dtype, known before the graph runs."""
    mine, whole = (tensor_of(each) if isinstance(each, fx.Node) else None for each in (node, other))
    if mine is None or whole is None or not (is_fixed(mine) and is_fixed(whole)):
        return False
    return (mine.shape, mine.dtype) == (whole.shape, whole.dtype)


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that a node yields, or None where it yields something else."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def ancestors(
    roots: Iterable[fx.Node],
    reads: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes"),
) -> set[fx.Node]:
    """The roots and all nodes that they depend on, by what each reads."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(reads(node))
    return seen


def descendants(roots: list[fx.Node]) -> set[fx.Node]:
    """The roots and all nodes that depend on them, without the output node."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen and node.op != "output":
            seen.add(node)
            stack.extend(node.users)
    return seen


def source_line(node: fx.Node) -> str:
    """``file:line code`` of the user's statement that made the node, or an empty string."""
    return _user_line(node.meta.get("stack_trace") or "")


_DEFAULT_DEVICE = "torch/utils/_device.py"  # through which every call goes where there is one


@functools.lru_cache(maxsize=1024)  # layers repeat the lines of one
def _user_line(trace: str) -> str:
    lines = [line.strip() for line in trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith('File "') and _DEFAULT_DEVICE not in lines[index]:
            path, line, *_ = lines[index].removeprefix('File "').split('", line ')[0:2]
            number = line.split(",")[0]
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{path}:{number} {code}".strip()
    return ""


ORIGIN = "origin"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What tracing knew of a node.

    Attributes:
        modules: the modules around the user's statement, outermost first, by their names; those
            of the forward's statement where the node is its derivative. A later call of a module
            has its number behind it, as in ``block@1``.
        is_backward: whether the backward was being traced; None where it cannot be told.
        recomputed: whether the user asked for it to be recomputed (``torch.utils.checkpoint``).
        checkpoint: the call of ``checkpoint`` around it.
    """

    modules: tuple[str, ...] = ()
    is_backward: bool | None = None
    recomputed: bool = False
    checkpoint: int | None = None


_NOWHERE = Origin()


def origin_of(node: fx.Node) -> Origin:
    """Where a node comes from; an origin that says nothing where nobody noted it."""
    origin = node.meta.get(ORIGIN, _NOWHERE)
    if not isinstance(origin, Origin):
        raise TypeError(f"{node.name} carries {origin!r}, expected an Origin")
    return origin


_UNKNOWN_SIZE = 4096  # stands for a size that only the data decides, such as a count of nonzeros


def concrete(size: int | torch.SymInt) -> int:
    """The size; for a symbolic one, what it was in the example that the graph was traced with."""
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
"""Numbers that a graph computes: of sizes, or read from data (``tensor.item()``)."""


def is_size(node: fx.Node) -> bool:
    """Whether the node yields a symbolic number."""
    return isinstance(node.meta.get("val"), NUMBERS)


def with_concrete_sizes(value: Any) -> Any:
    """A tensor without data and with concrete sizes in place of a symbolic one; numbers for
    symbolic numbers; containers of them likewise; anything else as it is.
    """
    match value:
        case torch.Tensor():
            if is_fixed(value):
                return value
            sizes = [concrete(size) for size in value.shape]
            return torch.empty(sizes, dtype=value.dtype, device="meta")
        case torch.SymInt():
            return concrete(value)
        case torch.SymFloat() | torch.SymBool():
            return 0  # of what is counted, nothing depends on it
        case list() | tuple():
            return type(value)(with_concrete_sizes(item) for item in value)
    return value
