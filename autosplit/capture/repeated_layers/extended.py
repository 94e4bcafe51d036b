"""``extend``: the joint graph of all layers from that of a few.

Tracing goes through a forward node by node, and autograd through its backward from the last layer
to the first. What comes out for a layer follows from what it reads, and that looks the same for
all layers of a run but those at its ends. So both halves of the joint graph repeat themselves,
and layers that were left out come out as those that were traced. That they do is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from .checkpoint_regions import CheckpointRegions
from .half import Half, JointForms
from .node_forms import NotRepeatedError
from .trace_marks import remarked

Rename = Callable[[dict[str, Any], int], dict[str, Any]]


class Extension:
    """Puts layers that were left out of a trace into the joint graph.

    Args:
        joint: of the layers that were traced.
        left_out: how many layers were not.
        backward: index of the backward's first node.
        rename: notes of a node, and by how many layers it comes later -> its notes there.
    """

    def __init__(self, joint: JointForms, left_out: int, backward: int, rename: Rename) -> None:
        self._joint, self._left_out, self._rename = joint, left_out, rename
        count = len(joint.forms.body)
        self._forward = Half(joint, 0, backward, left_out)
        self._halves = [self._forward]
        if backward < count:
            self._halves.append(Half(joint, backward, count, left_out, self._forward))
        self._regions = CheckpointRegions(joint, self._halves)

    def grow(self) -> None:
        """Put the layers in."""
        for index in range(len(self._joint.forms.body)):
            self._check_outside(index)
        for half in self._halves:
            self._grow(half)
        for half in self._halves:
            for index in range(half.first, half.last):
                self._note(half, index)

    def result(self, value: Any, later: int) -> Any:
        """What an output of a layer that was traced is now.

        Args:
            value: the output.
            later: by how many layers the layer comes later now.
        """
        index = self._joint.forms.place.get(value, -1)
        half = self._half_of(index)
        if half is None or index not in half:
            return value
        return half.at(index, later)

    def between(self, early: Any, late: Any) -> list[Any]:
        """Outputs of the layers that were put in.

        Args:
            early: of the last layer before them.
            late: of the first one behind them.
        """
        if early is None and late is None:
            return [None] * self._left_out
        place = self._joint.forms.place
        here, there = place.get(early, -1), place.get(late, -1)
        half = self._half_of(here)
        if half is None or here not in half or there not in half:
            raise NotRepeatedError("outputs of layers are not made in layers")
        if there - here != (half.period if half is self._forward else -half.period):
            raise NotRepeatedError("outputs of layers are not made alike")
        return [half.at(here, later) for later in range(1, self._left_out + 1)]

    def _half_of(self, index: int) -> Half | None:
        return next((half for half in self._halves if half.owns(index)), None)

    def _check_outside(self, index: int) -> None:
        """Raise where it cannot be told which of the layers is meant: a node outside of the runs
        reads from a layer on the other side of those put in, or one of a run from a certain layer.
        """
        forms = self._joint.forms
        half: Any = self._half_of(index)
        inside = index in half
        follows = half.follows(index) if inside else [False] * len(forms.reads[index])
        for read, moves in zip(forms.reads[index], follows, strict=True):
            if moves:
                continue
            if read in self._joint.order:
                series, at = self._joint.order[read]
                later = self._left_out * (at >= series.gap)
            else:
                place = forms.place.get(read, -1)
                other = self._half_of(place)
                if other is None or place not in other:
                    continue
                later = other.later(place)
            if inside or later != half.later(index):
                raise NotRepeatedError(f"{forms.body[index].name} reads {read.name} of one layer")

    def _grow(self, half: Half) -> None:
        body = self._joint.forms.body
        graph = body[half.cut].graph
        step = -1 if half is not self._forward else 1
        with graph.inserting_before(body[half.cut]):
            for layer in range(1, self._left_out + 1):
                for index in range(half.cut - half.period, half.cut):
                    later = half.later(index) + step * layer
                    half.nodes.append(self._copy(graph, half, index, later))
        half.nodes += body[half.cut : half.last]
        for index in range(half.start, half.end):
            later = half.later(index)
            node = body[index]
            node.args, node.kwargs = self._arguments(half, index, later)

    def _note(self, half: Half, index: int) -> None:
        """Bring the notes of a node that was traced up to date."""
        node, later, inside = self._joint.forms.body[index], half.later(index), index in half
        node.meta = self._noted(node, index, later, inside=inside)

    def _noted(self, node: fx.Node, index: int, later: int, *, inside: bool) -> dict[str, Any]:
        meta = self._rename(node.meta, later) if inside else node.meta
        mark = self._joint.mark(index, later, inside)
        return remarked(self._regions.moved(meta, later), mark)

    def _copy(self, graph: fx.Graph, half: Half, index: int, later: int) -> fx.Node:
        node = self._joint.forms.body[index]
        args, kwargs = self._arguments(half, index, later)
        target = _constant_again(node) if node.op == "get_attr" else node.target
        made = graph.create_node(node.op, target, args, kwargs)
        made.meta = self._noted(node, index, later, inside=True)
        return made

    def _arguments(self, half: Half, index: int, later: int) -> tuple[Any, Any]:
        """What a node of a run reads in a layer that comes so much later."""
        node = self._joint.forms.body[index]
        follows = iter(half.follows(index))

        def read(each: fx.Node) -> fx.Node:
            return self._moved(each, later) if next(follows) else each

        made: tuple[Any, Any] = fx.node.map_arg((node.args, node.kwargs), read)
        return made

    def _moved(self, node: fx.Node, later: int) -> fx.Node:
        if node in self._joint.order:
            series, at = self._joint.order[node]
            return series.inputs[at + later]
        index = self._joint.forms.place[node]
        half: Half = self._half_of(index)  # type: ignore[assignment]
        return half.at(index, later)


def _constant_again(node: fx.Node) -> str:
    """A constant of the same content, under a name of its own, as tracing would have made it; a
    graph that an operator runs is the same one.
    """
    owner: Any = node.graph.owning_module
    value = getattr(owner, str(node.target))
    if not isinstance(value, Tensor):
        return str(node.target)
    number = 0
    while hasattr(owner, f"_tensor_constant{number}"):
        number += 1
    name = f"_tensor_constant{number}"
    setattr(owner, name, value.clone())
    return name
