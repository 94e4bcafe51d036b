"""Liveness in bytes: what is alive while the code that is generated from a graph runs.

Counted in distinct storage: a tensor's memory dies with the last of its views. What a kernel takes
for itself and gives back before it returns is not in the graph, and known only where it is told.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from ..analysis.aliasing import storage_bytes, storage_root
from ..analysis.operators import overload
from ..graph import Role, outputs, placeholders, role_of, tensor_of
from .codegen import last_uses
from .inplace_reuse import reusable_operands


@dataclass(frozen=True)
class Result:
    """A value that a graph returns.

    Attributes:
        role: its role.
        memory: the number of the storage that it lies in, of those made by the graph; or the role
            of the input that it lies in; None for what is no tensor.
        bytes: of that storage.
    """

    role: Role
    memory: int | Role | None
    bytes: int


class LiveBytes:
    """One graph's allocations and releases.

    Args:
        module: the graph.
        workspace: bytes that kernels take beyond their results, by node.

    Attributes:
        takes: the roles of its inputs.
        results: what it returns, in order.
    """

    def __init__(
        self, module: fx.GraphModule, workspace: Mapping[fx.Node, int] = MappingProxyType({})
    ) -> None:
        graph = module.graph
        homes = _homes(graph)
        roles = {node: role_of(node) for node in placeholders(graph)}
        self.takes = {*roles.values()}
        # Per statement the bytes that it allocates, those that it gives back itself, and what is
        # gone after it: an input's role, or the bytes of what was made here.
        self._order = [
            (
                sum(map(storage_bytes, made)),
                0 if node is None else workspace.get(node, 0),
                [roles[home] if home in roles else storage_bytes(home) for home in dead],
            )
            for node, made, dead in _lifetimes(graph, homes)
        ]
        numbers: dict[fx.Node, int] = {}
        self.results = [
            _result(role, value, homes, roles, numbers) for role, value in outputs(graph)
        ]

    def peak(self, released: Iterable[tuple[Collection[Role], int]] = ()) -> int:
        """The most bytes alive at any time of a run over those alive when it begins.

        Args:
            released: of memory that nobody but the run holds, so that it is gone with its last use
                in it: the inputs that lie in one storage, and its bytes.
        """
        groups = [({*roles}, size) for roles, size in released]
        group_of = {role: group for group in groups for role in group[0]}
        level = highest = 0
        for made, workspace, dead in self._order:
            level += made
            highest = max(highest, level + workspace)
            for each in dead:
                if isinstance(each, int):
                    level -= each
                elif each in group_of:
                    roles, size = group_of[each]
                    roles.discard(each)
                    level -= 0 if roles else size
        return highest


def _result(
    role: Role,
    value: object,
    homes: Mapping[fx.Node, fx.Node],
    roles: Mapping[fx.Node, Role],
    numbers: dict[fx.Node, int],
) -> Result:
    if not isinstance(value, fx.Node) or tensor_of(value) is None:
        return Result(role, None, 0)
    home = homes[value]
    if home.op == "get_attr":  # the graph's own
        return Result(role, None, 0)
    if home in roles:
        return Result(role, roles[home], storage_bytes(home))
    return Result(role, numbers.setdefault(home, len(numbers)), storage_bytes(home))


def _homes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each tensor's node -> the node that allocated the memory that it lies in."""
    reused = reusable_operands(graph)
    homes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        root = storage_root(node)
        place = reused.get(node, _written_argument(node))
        operand = None if place is None else node.args[place]
        if isinstance(operand, fx.Node):
            root = operand
        homes[node] = root if root is node else homes.get(root, root)
    return homes


def _written_argument(node: fx.Node) -> int | None:
    """The place of the argument that an operator writes and returns."""
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
    """Each statement with the storages that it makes, and those that are gone after it; before
    them, what nobody reads.
    """
    kept = {homes[value] for _, value in outputs(graph) if isinstance(value, fx.Node)}
    names: dict[fx.Node, int] = defaultdict(int)
    for node in graph.nodes:
        if node.op != "output" and _is_tensor(node):
            names[homes[node]] += 1
    dying = last_uses(graph)
    unused = [node for node in placeholders(graph) if not node.users and node not in kept]
    yield None, [], unused
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        made = [home for home in allocated(node) if homes[home] is home]
        dead = []
        for each in dying.get(node, ()):
            for home in _ended(each, homes):
                names[home] -= 1
                if not names[home] and home not in kept:
                    dead.append(home)
        yield node, made, dead


def _is_tensor(node: fx.Node) -> bool:
    return tensor_of(node) is not None and node.op != "get_attr"


def allocated(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a statement allocates, unless it writes into an argument: its own, or
    those of the results picked from its tuple.
    """
    if node.op == "get_attr" or node.target is operator.getitem:
        return []
    if tensor_of(node) is not None:
        return [node]
    return [user for user in node.users if user.target is operator.getitem and _is_tensor(user)]


def _ended(node: fx.Node, homes: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    return [homes[node]] if _is_tensor(node) else []
