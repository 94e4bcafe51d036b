"""The lifetime of buffers while generated code runs, and which of them may be overwritten.

*Reuse.* Autograd's engine accumulates gradients in place, and models write ``x += y``. A functional
graph makes a new tensor for each sum. That costs memory and, on the CPU, the time to map its pages.
Generated code may therefore write an operator's result over an operand whose last use it is. The
graphs themselves stay functional.

*Liveness in bytes* counts distinct storage: a tensor's memory is freed with the last of its views.
The graph does not show the workspace that a kernel frees before it returns; callers pass the
workspace's bytes.

*Donation.* A backward reads most saved tensors for the last time where it computes a value of the
same size. The value may overwrite the saved tensor if nothing else can reach that tensor. No
further memory is then needed, and the written memory is still in the cache.

*Lending.* A deferred tensor may share storage with an input or an incoming gradient, which belongs
to the caller.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import fills_storage, producer, storage_bytes, storage_root
from ..analysis.operators import OPERATORS, is_effect, is_wait, overload, read_until
from ..graph import (
    SUBGRAPH,
    Kind,
    Role,
    SplitGraphs,
    computed_outputs,
    concrete,
    is_fixed,
    outputs,
    placeholders,
    role_of,
    tensor_of,
)
from .buffer_writes import written_buffer


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to the values that the node is the last to read, and to its own value if
    nothing reads it. Values that the graph returns are left out.
    """
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        if node.op != "placeholder" and node not in seen:
            last.setdefault(node, []).append(node)  # its value is never read
            seen.add(node)
        operands = read_until(node) if is_wait(node) else []
        for operand in (*node.all_input_nodes, *operands):
            if operand not in seen:
                seen.add(operand)
                last.setdefault(node, []).append(operand)
    return last


def reusable_operands(graph: fx.Graph) -> dict[fx.Node, int]:
    """Maps each node that may overwrite an operand to the operand's position. The operand was
    computed in this graph and is as large as the result. No later node reads the operand or a view
    of it.
    """
    last_read = _last_reads(graph, storage_root)
    reusable: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.target not in OPERATORS["overwrites"] or node.kwargs:
            continue
        for position in (0, 1) if node.target in OPERATORS["commutes"] else (0,):
            if _is_free_for(node, position, last_read):
                reusable[node] = position
                break
    return reusable


def _last_reads(graph: fx.Graph, home_of: Callable[[fx.Node], fx.Node]) -> dict[fx.Node, fx.Node]:
    """Maps the node that allocates a storage to the last node that reads the storage.

    Args:
        graph: the graph.
        home_of: returns the node that allocated the storage of a node's value.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        operands = read_until(node) if is_wait(node) else []
        last |= dict.fromkeys(map(home_of, (*node.all_input_nodes, *operands)), node)
    return last


def _is_free_for(node: fx.Node, position: int, last_read: Mapping[fx.Node, fx.Node]) -> bool:
    operand = node.args[position]
    if not isinstance(operand, fx.Node):
        return False
    root = storage_root(operand)
    operands = [other for other in node.all_input_nodes if other is not operand]
    return (
        last_read[root] is node
        and _is_fresh(root)
        and _fills(operand, root, node)
        and all(storage_root(other) is not root for other in operands)
    )


def _is_fresh(root: fx.Node) -> bool:
    if root.target is operator.getitem:
        maker, index = root.args
        first = isinstance(index, int) and index == 0
        return first and isinstance(maker, fx.Node) and maker.target in OPERATORS["fresh_first"]
    op = overload(root)
    if op is None or op.namespace != "aten" or is_effect(root):
        return False
    return op in OPERATORS["fresh"] or bool(torch.Tag.pointwise in op.tags)


def _fills(operand: fx.Node, root: fx.Node, result: fx.Node) -> bool:
    """Whether the result has the operand's dtype, shape and strides, and the operand fills its
    storage.
    """
    value, base, new = tensor_of(operand), tensor_of(root), tensor_of(result)
    if value is None or base is None or new is None:
        return False
    if not all(map(is_fixed, (value, base, new))):
        return False
    if (value.dtype, value.device) != (new.dtype, new.device):
        return False
    alike = (value.shape, value.stride()) == (new.shape, new.stride())
    return alike and value.numel() == base.numel()


@dataclass(frozen=True)
class Result:
    """A value that a graph returns.

    Attributes:
        role: the role of the value.
        memory: identifies the value's storage. A number is the index of the storage among the
            storages that the graph allocates. A role is the role of the input that shares the
            storage. None for constants and for values that are no tensors.
        bytes: size of the storage.
    """

    role: Role
    memory: int | Role | None
    bytes: int


class LiveBytes:
    """The bytes that are alive during a run of one graph.

    Args:
        module: the graph.
        workspace: bytes that kernels take beyond their results, by node; may be empty.
        size: returns the number for a symbolic size; by default that of the example inputs.

    Attributes:
        input_roles: the roles of the graph's inputs.
        results: the returned values, in order.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        workspace: Mapping[fx.Node, int],
        size: Callable[[Any], int] = concrete,
    ) -> None:
        graph = module.graph
        homes, bytes_of = _homes(graph), partial(storage_bytes, size=size)
        roles = {node: role_of(node) for node in placeholders(graph)}
        self.input_roles = {*roles.values()}
        # Per statement: bytes that it allocates, its workspace, and the storages that die after it
        # (an input's role, or the bytes of a storage of this graph).
        self._order = [
            (
                sum(map(bytes_of, new)),
                0 if node is None else workspace.get(node, 0),
                [roles[home] if home in roles else bytes_of(home) for home in dead],
            )
            for node, new, dead in _lifetimes(graph, homes)
        ]
        numbers: dict[fx.Node, int] = {}
        self.results = [
            _result(role, value, homes, roles, numbers, bytes_of) for role, value in outputs(graph)
        ]

    def peak(self, released: Iterable[tuple[Collection[Role], int]]) -> int:
        """The peak of a run in bytes, above the bytes that are alive when the run begins.

        Args:
            released: for each storage that only this run references, the roles of the inputs that
                share the storage, and its bytes. The storage is freed after its last use.
        """
        return max(self._levels(released))

    def end(self, released: Iterable[tuple[Collection[Role], int]]) -> int:
        """The bytes alive at the end of a run, results included, above the bytes at its beginning.
        ``released`` is as for ``peak``.
        """
        return [*self._levels(released)][-1]

    def _levels(self, released: Iterable[tuple[Collection[Role], int]]) -> Iterator[int]:
        groups = [({*roles}, size) for roles, size in released]
        group_of = {role: group for group in groups for role in group[0]}
        level = 0
        yield level
        for new, workspace, dead in self._order:
            level += new
            yield level + workspace
            for home in dead:
                if isinstance(home, int):
                    level -= home
                elif home in group_of:
                    roles, size = group_of[home]
                    roles.discard(home)
                    level -= 0 if roles else size
        yield level


def _result(
    role: Role,
    value: object,
    homes: Mapping[fx.Node, fx.Node],
    roles: Mapping[fx.Node, Role],
    numbers: dict[fx.Node, int],
    bytes_of: Callable[[fx.Node], int],
) -> Result:
    if not isinstance(value, fx.Node) or tensor_of(value) is None:
        return Result(role, None, 0)
    home = homes[value]
    if home.op == "get_attr":  # a constant of the graph
        return Result(role, None, 0)
    if home in roles:
        return Result(role, roles[home], bytes_of(home))
    return Result(role, numbers.setdefault(home, len(numbers)), bytes_of(home))


def _homes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Maps each node to the node that allocated its storage. A node that overwrites an operand maps
    to the node that allocated the operand's storage.
    """
    reused = reusable_operands(graph)
    homes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        root = storage_root(node)
        place = reused.get(node, _written_argument(node))
        operand = written_buffer(node) or (None if place is None else node.args[place])
        if isinstance(operand, fx.Node):
            root = operand
        homes[node] = root if root is node else homes.get(root, root)
    return homes


def _written_argument(node: fx.Node) -> int | None:
    """The position of the argument that an operator writes and returns."""
    op = overload(node)
    if op is None or len(op._schema.returns) != 1:
        return None
    returned = op._schema.returns[0].alias_info
    if returned is None or not returned.is_write:
        return None
    for place, argument in enumerate(op._schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write and place < len(node.args):
            return place
    return None


def _lifetimes(
    graph: fx.Graph, homes: Mapping[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node | None, list[fx.Node], list[fx.Node]]]:
    """Yield (statement, storages that it allocates, storages that die after it), in order. The
    first item has None as statement and the inputs that are never read as dead.
    """
    kept = {homes[value] for _, value in computed_outputs(graph)}
    last_read = _last_reads(graph, homes.__getitem__)
    dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for home in dict.fromkeys(homes.values()):
        if home not in kept and _is_tensor(home):
            dying[last_read.get(home, home)].append(home)  # a value that is never read dies at once
    yield None, [], [node for node in placeholders(graph) if node in dying]
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            new = [home for home in allocated(node) if homes[home] is home]
            yield node, new, dying.get(node, [])


def _is_tensor(node: fx.Node) -> bool:
    return tensor_of(node) is not None and node.op != "get_attr"


def allocated(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a statement allocates: the node itself, or the items of its tuple. An
    operator that writes into an argument allocates nothing, but is also returned.
    """
    if node.op == "get_attr" or node.target is operator.getitem:
        return []
    if tensor_of(node) is not None:
        return [node]
    return [user for user in node.users if user.target is operator.getitem and _is_tensor(user)]


def donatable(forward: fx.Graph) -> set[Role]:
    """Roles of the saved tensors that only the backward can reach. Inputs, state, outputs, values
    that are saved twice, and views of any of these are excluded.
    """
    returned = computed_outputs(forward)
    holders = Counter(storage_root(node) for _, node in returned)
    return {
        role
        for role, node in returned
        if role.kind is Kind.SAVED
        and holders[storage_root(node)] == 1
        and fills_storage(node)
        # A schema says which results are views; other callables have none.
        and overload(producer(node)) is not None
    }


def private(graph: fx.Graph, kind: Kind, donated: Collection[Role] = ()) -> set[Role]:
    """Roles of the results of a kind that no code outside of graphs can write into. The graph
    computes such a result itself, or passes it on from an input with a donated role. No result of
    another kind shares its storage.
    """
    pairs = computed_outputs(graph)
    out = {storage_root(value) for role, value in pairs if role.kind is not kind}
    return {role for role, node in pairs if role.kind is kind and _is_private(node, out, donated)}


def _is_private(node: fx.Node, out: Collection[fx.Node], donated: Collection[Role]) -> bool:
    root = storage_root(node)
    if root.op == "placeholder":
        return role_of(root) in donated and root not in out
    maker = producer(root)
    # A schema says which results are views; other callables have none.
    has_schema = overload(maker) is not None or SUBGRAPH in maker.meta or tensor_of(node) is None
    return has_schema and root.op == "call_function" and root not in out


def lender_roles(graphs: SplitGraphs) -> dict[Role, Role]:
    """Maps the role of a deferred tensor to the role of the input or tangent whose storage the
    deferred tensor shares.

    Deferred tensors whose storage a graph allocated, or that share storage with a parameter or
    buffer, are left out.
    """
    if graphs.backward_input is None:
        return {}
    saved = _roots(graphs.forward.graph, Kind.SAVED)
    lenders_of = {}
    for role, root in _roots(graphs.backward_input.graph, Kind.DEFERRED).items():
        lender = saved.get(root, root)
        if lender.kind in {Kind.INPUT, Kind.TANGENT}:
            lenders_of[role] = lender
    return lenders_of


def _roots(graph: fx.Graph, kind: Kind) -> dict[Role, Role]:
    """Maps the roles of results of a kind to the role of the graph's input whose storage the result
    shares. Other results are left out.
    """
    roots = [(role, storage_root(value)) for role, value in computed_outputs(graph, kind)]
    return {role: role_of(root) for role, root in roots if root.op == "placeholder"}
