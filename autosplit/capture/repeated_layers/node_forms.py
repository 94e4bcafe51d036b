"""What of a node is the same in every layer: its form, apart from the nodes that it reads."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from autosplit.capture.cache.fingerprint import traced_value

_OFTEN = 3  # times that something comes back, at least, to be part of a layer
_MULTIPLES = (1, 2, 3, 4, 6)  # of the smallest period: attention of two kinds in turn
_NOTES = ("stack_trace", "recompute", "partitioner_tag")
_SMALL = 1024  # elements of a constant that are compared with those of another


class NotRepeatedError(Exception):
    """A graph does not repeat itself, or not in a way that is understood; it is traced whole."""


class UnlikeLayersError(NotRepeatedError):
    """Layers that were traced did not come out alike."""


class _Reference:
    """Stands for a node in the text of arguments."""

    def __repr__(self) -> str:
        return "%"


_REFERENCE: Any = _Reference()


class NodeForms:
    """Forms of the nodes of a graph that compute, and what each of them reads.

    Args:
        body: the nodes, in their order.
        value: what stands for the result of a node.

    Attributes:
        body: the nodes.
        place: node -> its index in the body.
        forms: equal for two nodes that do the same with what they read, to results that look the
            same, on the same line of the user's.
        reads: nodes that each of them reads, in the order of its arguments.
    """

    def __init__(self, body: Sequence[fx.Node], value: Callable[[fx.Node], Any]) -> None:
        self.body = list(body)
        self.place = {node: index for index, node in enumerate(body)}
        self.forms: list[Hashable] = []
        self.reads: list[list[fx.Node]] = []
        for node in body:
            read: list[fx.Node] = []

            def refer(each: fx.Node, read: list[fx.Node] = read) -> Any:
                read.append(each)
                return _REFERENCE

            written = repr(fx.node.map_arg((node.args, node.kwargs), refer))
            target = _constant(node) if node.op == "get_attr" else node.target
            notes = [node.meta.get(note) for note in _NOTES]
            self.forms.append((node.op, target, written, looks(value(node)), *notes))
            self.reads.append(read)
        self._inside: dict[fx.Node, Hashable] = {}

    def inside(self, node: fx.Node) -> Hashable:
        """The form of the graph that a node stands for; None where it stands for none."""
        if node not in self._inside:
            body = body_of(node)
            self._inside[node] = None if body is None else body_form(body)
        return self._inside[node]


def looks(value: Any) -> Hashable:
    """What tracing can see of a value.

    Raises:
        NotRepeatedError: it is a tensor of a class of its own.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is not FakeTensor:
            raise NotRepeatedError(f"a value is a {type(value).__name__}")
        sizes = str(value.shape), str(value.stride()), str(value.storage_offset())
        return (*sizes, value.dtype, value.device, value.layout, value.requires_grad)
    if isinstance(value, list | tuple):
        return (type(value), *map(looks, value))
    return type(value), str(value)


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node stands for: a checkpointed region, or what another operator runs."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return value if isinstance(value, fx.GraphModule) else None


def body_form(body: fx.GraphModule) -> Hashable:
    """Equal for two graphs that do the same."""
    nodes = [*body.graph.nodes]
    found: list[Hashable] = []
    for node in nodes:
        inner = body_of(node)
        if inner is not None:
            found.append(body_form(inner))
        elif node.op == "get_attr":
            raise NotRepeatedError(f"a graph inside holds a constant, {node.target}")
    number = {node: at for at, node in enumerate(nodes)}
    for node in nodes:
        reads = repr(fx.node.map_arg((node.args, node.kwargs), number.__getitem__))
        target = node.target if node.op.startswith("call_") else None
        value = looks(traced_value(node))
        found.append((node.op, target, reads, value, node.meta.get("stack_trace")))
    return tuple(found)


def _constant(node: fx.Node) -> Hashable:
    """What a constant holds; its name where that is much."""
    body = body_of(node)
    if body is not None:
        return body_form(body)
    value = getattr(node.graph.owning_module, str(node.target))
    if type(value) is not torch.Tensor or value.numel() > _SMALL:
        return str(node.target)
    with torch.utils._python_dispatch._disable_current_modes():
        return value.dtype, value.device, str(value.shape), str(value.tolist())


def spacings(forms: Sequence[Hashable]) -> Iterator[int]:
    """How far apart things of one form are, the most common distances first, and multiples."""
    places: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, form in enumerate(forms):
        places[form].append(index)
    apart: collections.Counter[int] = collections.Counter()
    for found in places.values():
        if len(found) >= _OFTEN:
            apart.update(b - a for a, b in itertools.pairwise(found))
    bases = [gap for gap, _ in apart.most_common(3)]
    yield from dict.fromkeys(base * times for base in bases for times in _MULTIPLES)


def longest(matched: Sequence[bool]) -> tuple[int, int]:
    """The longest stretch of true ones, as first and last + 1."""
    best, first = (0, 0), 0
    for index, each in enumerate((*matched, False)):
        if not each:
            best = max(best, (first, index), key=lambda found: found[1] - found[0])
            first = index + 1
    return best
