"""Stacked loop-carried values: where a stack is found in the graph, or how it is made.

A value may be a slice of one tensor: selected from it, or an operand that it concatenates.

A stack holds the values of all iterations along its first dimension. An operator of one iteration
is applied to stacked operands as ``torch.vmap`` does it: views, exact pointwise arithmetic, batched
matrix products (iterations become part of the batch), and padding along a dimension of size one.
Results have the same bits, those of matrix products as far as a kernel's result does not depend on
the size of the batch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..analysis.operators import OPERATORS, is_recomputed
from ..graph import calls, is_fixed, origin_of, placeholders, tensor_of
from ..rewrites.emit import emit

aten = torch.ops.aten


class Stacked(NamedTuple):
    """A stacked operand: a node whose value has the iterations along its first dimension."""

    node: fx.Node


def can_be_stacked(node: fx.Node) -> bool:
    """Whether ``on_stacks`` takes the node's operator."""
    if node.op != "call_function" or tensor_of(node) is None:
        return False
    if node.target in OPERATORS["pads"]:
        return isinstance(_written(node), fx.Node) and node.meta["val"].shape[node.args[2]] == 1
    return is_computation(node) or node.target in OPERATORS["stacks"]


def stacked_arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments that ``on_stacks`` takes: of padding only what is written and where, not the
    zeros around it, of which nothing is left where the dimension has size one.
    """
    return (_written(node), node.args[2]) if node.target in OPERATORS["pads"] else node.args


def is_computation(node: fx.Node) -> bool:
    """Whether the operator computes, rather than being a view of its argument, and rounds the same
    way wherever an element lies.
    """
    exact = node.target in OPERATORS["elementwise"] and not node.kwargs
    return node.target is aten.bmm.default or exact


def _written(node: fx.Node) -> Any:
    """The operand that padding writes into zeros."""
    return node.args[1 if node.target is aten.select_scatter.default else 0]


def on_stacks(graph: fx.Graph, node: fx.Node, arguments: Sequence[Any]) -> fx.Node:
    """The stacked results of an operator, where the graph inserts.

    Args:
        graph: to add to.
        node: the operator's call in one iteration.
        arguments: of that call; those that differ between iterations are ``Stacked``.
    """
    target: Any = node.target
    if target in OPERATORS["pads"]:
        target = aten.unsqueeze.default
    elif target in OPERATORS["reshapes"]:
        target = aten.reshape.default
    given = [each.node if isinstance(each, Stacked) else each for each in arguments]
    operands = [each for each in given if isinstance(each, fx.Node)]
    taken = [each for each in arguments if isinstance(each, (Stacked, fx.Node))]

    def call(*tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        return target(*(next(left) if isinstance(each, fx.Node) else each for each in given))

    dims = tuple(0 if isinstance(each, Stacked) else None for each in taken)
    values = [each.meta["val"] for each in operands]
    with torch.no_grad(), values[0].fake_mode:
        traced = make_fx(torch.vmap(call, dims))(*values)
    copies = dict(zip(placeholders(traced.graph), operands, strict=True))
    for inner in traced.graph.nodes:
        if inner.op == "call_function":
            args = fx.node.map_arg(inner.args, copies.__getitem__)
            copies[inner] = emit(graph, node, inner.target, *args, **inner.kwargs)
    result: Any = traced.graph.output_node().args[0]
    return copies[result]


class SliceOf(NamedTuple):
    """A value that is ``tensor.select(dim, step)``."""

    tensor: fx.Node
    dim: int
    step: int


def selected_slice(node: fx.Node) -> SliceOf | None:
    """The slice that a ``select`` or an item of ``unbind`` reads; None for any other node."""
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
    return SliceOf(tensor, dim % value.ndim, index % value.shape[dim])


def laid_out(node: fx.Node) -> tuple[int, list[fx.Node | None]] | None:
    """For a ``cat`` or ``stack``: its dimension, and the value at every index along it (None at
    indices of an operand with more than one). None for any other node.
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


MIN_STEPS = 4
"""Fewer iterations are not treated as a loop."""

_MAX_PARTS = 3  # slices of other tensors that a stack may be concatenated from

StepValues = tuple[fx.Node, ...]
"""The values of one operator at consecutive iterations."""


class StackPart(NamedTuple):
    """A run of values that are consecutive slices of one tensor; or a single value."""

    place: SliceOf | None
    values: StepValues


class StackPlan(NamedTuple):
    """How to get a stack.

    Attributes:
        values: what it stacks.
        arguments: of the operator that makes it from other stacks: plans, nodes that all
            iterations share, and constants; None where it is concatenated from parts.
        parts: what it is concatenated from.
        made: values that have to be copied into a new stack on the way.
        computes: whether an operator on the way computes, rather than being a view.
    """

    values: StepValues
    arguments: tuple[Any, ...] | None
    parts: tuple[StackPart, ...]
    made: frozenset[StepValues]
    computes: bool


class StackedValues:
    """Plans and makes the stacks of one graph.

    Attributes:
        made: stacks that values were copied into, and those values.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.made: list[tuple[fx.Node, StepValues]] = []
        self._graph = graph
        self._places: dict[fx.Node, list[SliceOf]] = {}
        values = [value for value in map(tensor_of, graph.nodes) if value is not None]
        self._most = max((_bytes(value) for value in values if is_fixed(value)), default=0)
        for node in calls(graph):
            if found := laid_out(node):
                self._put(node, *found)

    def fits(self, values: StepValues) -> bool:
        """Whether a stack of these is no larger than the largest tensor of the graph."""
        return _bytes(values[0].meta["val"]) * len(values) <= self._most

    def forget(self, erased: set[fx.Node]) -> None:
        """Drop what is known of erased nodes."""
        self.made = [(stack, values) for stack, values in self.made if stack not in erased]
        for value, places in self._places.items():
            self._places[value] = [place for place in places if place.tensor not in erased]

    def plan(self, values: StepValues, at: fx.Node, dying: frozenset[fx.Node]) -> StackPlan:
        """How to get the stack of some values before ``at``; readers in ``dying`` do not count."""
        parts = self._parts(values, at)
        if len(parts) > 1:
            vectorized = self.vectorized(values, at, dying)
            if vectorized and len(vectorized.made) <= 1:
                return vectorized
        if len(parts) <= _MAX_PARTS:
            return StackPlan(values, None, parts, frozenset(), False)
        return StackPlan(values, None, (), frozenset([values]), False)

    def vectorized(
        self, values: StepValues, at: fx.Node, dying: frozenset[fx.Node]
    ) -> StackPlan | None:
        """How to make the stack by one batched operator; None where there is none, or where the
        iterations' own operators would have to run as well.
        """
        first = values[0]
        if not can_be_stacked(first) or not all(_is_alike(each, first) for each in values):
            return None
        dead = all(user in dying for each in values for user in each.users)
        if is_computation(first) and not (dead and self.fits(values)):
            return None
        dying = dying.union(values) if dead else dying
        arguments: list[Any] = []
        for argument in zip(*map(stacked_arguments, values), strict=True):
            if all(each == argument[0] for each in argument):
                arguments.append(argument[0])
            elif all(isinstance(each, fx.Node) for each in argument):
                arguments.append(self.plan(argument, at, dying))
            else:
                return None
        plans = [each for each in arguments if isinstance(each, StackPlan)]
        made: frozenset[StepValues] = frozenset().union(*(each.made for each in plans))
        if not plans or not all(_are_alike(each.values) for each in plans):
            return None
        if not all(map(self.fits, made)):
            return None
        computes = is_computation(first) or any(each.computes for each in plans)
        return StackPlan(values, tuple(arguments), (), made, computes)

    def make(self, plan: StackPlan, at: fx.Node) -> fx.Node:
        """Carry out a plan before ``at``."""
        first = plan.values[0]
        if plan.arguments is None:
            if not plan.parts:
                return self._stack_anew(plan.values, at)
            with self._graph.inserting_before(at):
                parts = [self._part(part) for part in plan.parts]
                return parts[0] if len(parts) == 1 else self._emit(first, aten.cat.default, parts)
        stacked = [
            Stacked(self.make(each, at)) if isinstance(each, StackPlan) else each
            for each in plan.arguments
        ]
        with self._graph.inserting_before(at):
            return on_stacks(self._graph, first, stacked)

    def slice(self, place: SliceOf, count: int, like: fx.Node) -> fx.Node:
        """The stack of ``count`` consecutive slices of one tensor."""
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
                self._places.setdefault(value, []).append(SliceOf(tensor, dim, index))

    def _places_of(self, value: fx.Node) -> list[SliceOf]:
        found = selected_slice(value)
        return [*([found] if found else []), *self._places.get(value, [])]

    def _parts(self, values: StepValues, at: fx.Node) -> tuple[StackPart, ...]:
        found: list[StackPart] = []
        start = 0
        while start < len(values):
            best = StackPart(None, values[start : start + 1])
            for place in self._places_of(values[start]):
                count = self._count(place, values[start:])
                if count > len(best.values) and place.tensor < at:
                    best = StackPart(place, values[start : start + count])
            found.append(best)
            start += len(best.values)
        return tuple(found)

    def _count(self, place: SliceOf, values: StepValues) -> int:
        """How many of the values are consecutive slices, from a place on."""
        count = 1
        while count < len(values) and place._replace(step=place.step + count) in self._places_of(
            values[count]
        ):
            count += 1
        return count

    def _part(self, part: StackPart) -> fx.Node:
        first = part.values[0]
        if part.place is None:
            return self._emit(first, aten.unsqueeze.default, first, 0)
        return self.slice(part.place, len(part.values), first)

    def _stack_anew(self, values: StepValues, at: fx.Node) -> fx.Node:
        """A new stack of copies, made as early as possible so that it can be reused."""
        for stack, of in self.made:
            if of == values and stack < at:
                return stack
        last = max(values)
        with self._graph.inserting_before(at if last.op == "placeholder" else last.next):
            joined = self._emit(last, aten.cat.default, list(values))
            sizes = [len(values), *values[0].meta["val"].shape]
            stack = self._emit(last, aten.view.default, joined, sizes)
        self._put(stack, 0, values)
        self.made.append((stack, values))
        return stack


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    return node.target == other.target and node.kwargs == other.kwargs and _are_alike((node, other))


def _are_alike(nodes: StepValues) -> bool:
    """Whether values can be stacked."""
    return len({stacking_key(node) for node in nodes}) == 1 and stacking_key(nodes[0]) is not None


def stacking_key(node: fx.Node) -> tuple[Any, ...] | None:
    """Equal for values that can be stacked; None for a value that can be in no stack."""
    value = tensor_of(node)
    if value is None or not is_fixed(value) or value.ndim == 0 or value.numel() == 0:
        return None
    origin = origin_of(node)
    fate = origin.is_backward, origin.recomputed, origin.checkpoint, is_recomputed(node)
    return tuple(value.shape), value.dtype, value.device, *fate
