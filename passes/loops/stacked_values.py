"""Wholes: tensors that hold what one thing is at all steps of an unrolled loop, steps first."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..analysis.operators import is_recomputed
from ..analysis.symbolic_sizes import is_fixed
from ..graph import calls, tensor_of
from ..origin import origin_of
from ..rewrites.emit import emit
from .stacked_operators import Whole, arguments_of, is_computing, lift_of, shaped

aten = torch.ops.aten

STEPS = 4
"""Fewer are no loop."""

_PIECES = 3  # of how many parts of other tensors a whole may be put together

Family = tuple[fx.Node, ...]


class Place(NamedTuple):
    """Where a value lies: ``tensor.select(dim, step)``."""

    tensor: fx.Node
    dim: int
    step: int


class Piece(NamedTuple):
    """Consecutive values of a family that lie so in one tensor too; alone, a value by itself."""

    place: Place | None
    values: Family


class Plan(NamedTuple):
    """How to get a whole.

    Attributes:
        values: whose whole it is.
        arguments: of the operator that makes it of other wholes: plans, nodes that all steps
            share, and constants; None where it is put together from pieces.
        pieces: what it is put together from.
        made: of which values wholes are made anew on the way.
        computes: whether operators are lifted on the way that do more than look at a tensor.
    """

    values: Family
    arguments: tuple[Any, ...] | None
    pieces: tuple[Piece, ...]
    made: frozenset[Family]
    computes: bool


def selected(node: fx.Node) -> Place | None:
    """Where a value lies that was selected from another."""
    args: Any = node.args
    if node.target is aten.select.int:
        tensor, dim, index = args
    elif node.target is operator.getitem and args[0].target is aten.unbind.int:
        unbound: Any = args[0].args
        tensor, dim, index = unbound[0], unbound[1] if len(unbound) > 1 else 0, args[1]
    else:
        return None
    value = tensor_of(tensor)
    if value is None or not is_fixed(value) or not isinstance(index, int):
        return None
    return Place(tensor, dim % value.ndim, index % value.shape[dim])


def laid(node: fx.Node) -> tuple[int, list[fx.Node | None]] | None:
    """The dimension along which a node lays values side by side, and for every index along it
    the value there; None for what is more than one value.
    """
    value, args = tensor_of(node), (*node.args, 0)
    if node.target not in (aten.cat.default, aten.stack.default) or value is None:
        return None
    if not is_fixed(value) or node.kwargs:
        return None
    parts: Any = args[0]
    along: Any = args[1]
    dim = along % value.ndim
    if node.target is aten.stack.default:
        return dim, list(parts)
    found: list[fx.Node | None] = []
    for part in parts:
        if part.meta["val"].ndim != value.ndim:  # concatenating takes empty vectors too
            return None
        size = part.meta["val"].shape[dim]
        inner = part.args[0] if part.target is aten.unsqueeze.default else None
        alone = inner is not None and part.args[1] % value.ndim == dim
        found += [inner] if alone else [None] * size
    return dim, found


class Wholes:
    """Plans and makes the wholes of one graph.

    Attributes:
        made: wholes that were made anew, and what they are made of.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.made: list[tuple[fx.Node, Family]] = []
        self._graph = graph
        self._places: dict[fx.Node, list[Place]] = {}
        values = [value for value in map(tensor_of, graph.nodes) if value is not None]
        self._most = max((_bytes(value) for value in values if is_fixed(value)), default=0)
        for node in calls(graph):
            if found := laid(node):
                self._put(node, *found)

    def fits(self, values: Family) -> bool:
        """Whether a whole of these would not be larger than what there is."""
        return _bytes(values[0].meta["val"]) * len(values) <= self._most

    def forget(self, erased: set[fx.Node]) -> None:
        """Look for nothing in tensors that are gone."""
        self.made = [(whole, values) for whole, values in self.made if whole not in erased]
        for value, places in self._places.items():
            self._places[value] = [place for place in places if place.tensor not in erased]

    def plan(self, values: Family, at: fx.Node, dying: frozenset[fx.Node]) -> Plan:
        """How to get the whole of some values before ``at``; ``dying`` nodes read nothing."""
        pieces = self._pieces(values, at)
        if len(pieces) > 1:
            lifted = self.lifted(values, at, dying)
            if lifted and len(lifted.made) <= 1:
                return lifted
        if len(pieces) <= _PIECES:
            return Plan(values, None, pieces, frozenset(), False)
        return Plan(values, None, (), frozenset([values]), False)

    def lifted(self, values: Family, at: fx.Node, dying: frozenset[fx.Node]) -> Plan | None:
        """How to make it by lifting the operator of every step; None where that cannot be, or
        would not spare the steps theirs.
        """
        first = values[0]
        if lift_of(first) is None or not all(_is_alike(each, first) for each in values):
            return None
        dead = all(user in dying for each in values for user in each.users)
        if is_computing(first) and not (dead and self.fits(values)):
            return None
        dying = dying.union(values) if dead else dying
        arguments: list[Any] = []
        for argument in zip(*map(arguments_of, values), strict=True):
            if all(each == argument[0] for each in argument):
                arguments.append(argument[0])
            elif all(isinstance(each, fx.Node) for each in argument):
                arguments.append(self.plan(argument, at, dying))
            else:
                return None
        plans = [each for each in arguments if isinstance(each, Plan)]
        made: frozenset[Family] = frozenset().union(*(each.made for each in plans))
        if not plans or not all(_are_alike(each.values) for each in plans):
            return None
        if not all(map(self.fits, made)):
            return None
        computes = is_computing(first) or any(each.computes for each in plans)
        return Plan(values, tuple(arguments), (), made, computes)

    def make(self, plan: Plan, at: fx.Node) -> fx.Node:
        """Do as planned."""
        first = plan.values[0]
        if plan.arguments is None:
            if not plan.pieces:
                return self._made_anew(plan.values, at)
            with self._graph.inserting_before(at):
                parts = [self._part(piece, at) for piece in plan.pieces]
                return parts[0] if len(parts) == 1 else self._emit(first, aten.cat.default, parts)
        wholes = [
            Whole(self.make(each, at)) if isinstance(each, Plan) else each
            for each in plan.arguments
        ]
        with self._graph.inserting_before(at):
            return self.apply(first, wholes)

    def apply(self, node: fx.Node, arguments: list[Any]) -> fx.Node:
        """The operator of one step on all, where the graph inserts."""
        lift = lift_of(node)
        if lift is None:
            raise TypeError(f"{node.name}: {node.target} is not lifted")
        return lift(functools.partial(self._emit, node), node, arguments)

    def slice(self, place: Place, count: int, like: fx.Node) -> fx.Node:
        """The whole of ``count`` values that lie in one tensor from a place on."""
        tensor, dim, start = place
        extent = tensor.meta["val"].shape[dim]
        if count < extent:
            end = start + count
            tensor = self._emit(like, aten.slice.Tensor, tensor, dim, start, end)
        if dim == 0:
            return tensor
        order = [each for each in range(tensor.meta["val"].ndim) if each != dim]
        return self._emit(like, aten.permute.default, tensor, [dim, *order])

    def _emit(self, like: fx.Node, target: Any, *args: Any, **options: Any) -> fx.Node:
        return emit(self._graph, like, target, *args, **options)

    def _put(self, tensor: fx.Node, dim: int, values: Sequence[fx.Node | None]) -> None:
        for index, value in enumerate(values):
            if value is not None:
                self._places.setdefault(value, []).append(Place(tensor, dim, index))

    def _places_of(self, value: fx.Node) -> list[Place]:
        found = selected(value)
        return [*([found] if found else []), *self._places.get(value, [])]

    def _pieces(self, values: Family, at: fx.Node) -> tuple[Piece, ...]:
        found: list[Piece] = []
        start = 0
        while start < len(values):
            best = Piece(None, values[start : start + 1])
            for place in self._places_of(values[start]):
                count = self._count(place, values[start:])
                if count > len(best.values) and _is_reachable(place.tensor, at):
                    best = Piece(place, values[start : start + count])
            found.append(best)
            start += len(best.values)
        return tuple(found)

    def _count(self, place: Place, values: Family) -> int:
        """How many of the values lie one behind the other from a place on."""
        count = 1
        while count < len(values) and place._replace(step=place.step + count) in self._places_of(
            values[count]
        ):
            count += 1
        return count

    def _part(self, piece: Piece, at: fx.Node) -> fx.Node:
        first = piece.values[0]
        if piece.place is None:
            return self._emit(first, aten.unsqueeze.default, first, 0)
        _bring(piece.place.tensor, at)
        return self.slice(piece.place, len(piece.values), first)

    def _made_anew(self, values: Family, at: fx.Node) -> fx.Node:
        """As early as it can be, for all who come later."""
        for whole, of in self.made:
            if of == values and whole < at:
                return whole
        last = max(values)
        with self._graph.inserting_before(at if last.op == "placeholder" else last.next):
            joined = self._emit(last, aten.cat.default, list(values))
            emitter = functools.partial(self._emit, last)
            whole = shaped(emitter, joined, [len(values), *values[0].meta["val"].shape])
        self._put(whole, 0, values)
        self.made.append((whole, values))
        return whole


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    return node.target == other.target and node.kwargs == other.kwargs and _are_alike((node, other))


def _are_alike(nodes: Family) -> bool:
    """Whether values have the same form and the same fate."""
    return len({traits(node) for node in nodes}) == 1 and traits(nodes[0]) is not None


def traits(node: fx.Node) -> tuple[Any, ...] | None:
    """What all values of a family must have in common; None for what belongs to none."""
    value = tensor_of(node)
    if value is None or not is_fixed(value) or value.ndim == 0 or value.numel() == 0:
        return None
    origin = origin_of(node)
    fate = origin.is_backward, origin.recomputed, origin.checkpoint, is_recomputed(node)
    return tuple(value.shape), value.dtype, value.device, *fate


def _is_reachable(tensor: fx.Node, at: fx.Node) -> bool:
    """Whether a tensor is there, or can be laid together, before a node."""
    if tensor < at:
        return True
    return tensor is not at and laid(tensor) is not None and all(r < at for r in _read(tensor))


def _read(tensor: fx.Node) -> list[fx.Node]:
    """What is laid together, behind the views that make room for it."""
    parts: Any = tensor.args[0]
    return [p.args[0] if p.target is aten.unsqueeze.default else p for p in parts]


def _bring(tensor: fx.Node, at: fx.Node) -> None:
    """Lay a reachable tensor together before a node."""
    if tensor < at:
        return
    parts: Any = tensor.args[0]
    for node in (*parts, tensor):
        if not node < at:
            at.prepend(node)
