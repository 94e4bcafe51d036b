"""``LayerResults``: what layers return, and the gradients of that."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from torch import fx
from torch._functorch._aot_autograd import descriptors as d

from autosplit.passes.graph import placeholders

from .node_forms import NotRepeatedError
from .series import Series
from .shortened import Shortened


class LayerResults:
    """Leaves of a module's results that its layers make, one a layer.

    Attributes:
        series: indices of leaves by layer, the number of the first layer before them.
    """

    def __init__(self, short: Shortened) -> None:
        self._short = short
        run = short.run
        made: dict[int, dict[int, int]] = collections.defaultdict(dict)
        for index, each in enumerate(short.results):
            place = run.forms.place.get(each, -1) if isinstance(each, fx.Node) else -1
            if run.first <= place < run.last:
                layer, phase = divmod(place - run.first, run.period)
                if made[phase].setdefault(layer, index) != index:
                    raise NotRepeatedError(f"{each.name} is returned twice")
        gap = (short.start - run.first) // run.period
        self.series = [
            self._whole(by_layer, gap)
            for by_layer in made.values()
            if any(gap <= layer < gap + short.left_out for layer in by_layer)
        ]

    def _whole(self, by_layer: dict[int, int], gap: int) -> tuple[list[int], int]:
        """Leaves of consecutive layers, and which of them is the first that was left out."""
        left_out = self._short.left_out
        if any(layer not in by_layer for layer in range(gap - 1, gap + left_out + 1)):
            raise NotRepeatedError("some layers return what others do not")
        first = gap
        while first - 1 in by_layer:
            first -= 1
        last = gap + left_out
        while last + 1 in by_layer:
            last += 1
        return [by_layer[layer] for layer in range(first, last + 1)], gap - first

    def later(self, index: int) -> int:
        """By how many layers the layer of a leaf comes later than where it was traced."""
        short = self._short
        place = short.run.forms.place.get(short.results[index], -1)
        return short.left_out if short.end <= place < short.run.last else 0

    def add_tangents(self, graph: fx.Graph) -> Iterator[Series]:
        """Give the joint graph the gradients of what was left out, and number all by leaves."""
        taken: dict[int, fx.Node] = {}
        for node in placeholders(graph):
            desc = node.meta["desc"]
            if isinstance(desc, d.TangentAOTInput):
                index = self._short.kept[desc.output.idx]  # type: ignore[attr-defined]
                node.meta["desc"] = d.TangentAOTInput(d.PlainAOTOutput(index))
                taken[index] = node
        for leaves, gap in self.series:
            like = taken.get(leaves[gap - 1])
            if like is None:
                continue
            for index in leaves[gap : gap + self._short.left_out]:
                before = max(each for each in taken if each < index)
                with graph.inserting_after(taken[before]):
                    taken[index] = node = graph.placeholder(f"tangents_{index + 1}")
                node.meta = like.meta | {"desc": d.TangentAOTInput(d.PlainAOTOutput(index))}
            if any(index not in taken for index in leaves):
                raise NotRepeatedError("some layers return what needs no gradient")
            yield Series([taken[index] for index in leaves], gap, self._short.left_out)
