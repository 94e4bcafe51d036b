"""``find_layers``: where a captured forward repeats itself."""

from __future__ import annotations

import dataclasses

from torch import Tensor, fx

from autosplit.capture.cache.fingerprint import traced_value

from .node_forms import NodeForms, NotRepeatedError, longest, looks, spacings

_KEPT = 4
"""Layers that are traced. Layers follow one another: where three that do come out alike, so do all
that stand between them."""
_LEAST = 2  # layers to leave out, for it to pay
_ADDING_UP = 2  # more, where layers add to one gradient: the first has nothing to add it to


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """A stretch of a forward that repeats itself.

    Attributes:
        forms: of the nodes of the whole graph.
        first: index of the first node that repeats itself; not as a rule where a layer begins.
        last: index behind the last one.
        period: nodes of a layer.
        successor: input of the graph that one layer reads -> the one that the next layer reads in
            its place.
    """

    forms: NodeForms
    first: int
    last: int
    period: int
    successor: dict[fx.Node, fx.Node]

    @property
    def layers(self) -> int:
        """How often it repeats itself."""
        return (self.last - self.first) // self.period

    @property
    def kept(self) -> int:
        """How many of the layers are to be traced."""
        middle = range(self.first, self.first + self.period)
        shared = (
            traced_value(read)
            for index in middle
            for read, follows in zip(self.forms.reads[index], self.follows(index), strict=True)
            if not follows
        )
        adds_up = any(isinstance(each, Tensor) and each.requires_grad for each in shared)
        return _KEPT + _ADDING_UP * adds_up

    def follows(self, index: int) -> list[bool]:
        """Of each node that a node of the run reads: whether the next layer reads the next one
        (True) or the same one.
        """
        earlier = index if index + self.period < self.last else index - self.period
        one, other = self.forms.reads[earlier], self.forms.reads[earlier + self.period]
        return [a is not b for a, b in zip(one, other, strict=True)]


def find_layers(forms: NodeForms) -> LayerRun:
    """The stretch that repeats itself most.

    Raises:
        NotRepeatedError: there is none worth it.
    """
    runs = [run for period in spacings(forms.forms) if (run := _run(forms, period))]
    left_out = [run.layers - run.kept for run in runs]
    saved = [
        layers * run.period if layers >= _LEAST else 0
        for layers, run in zip(left_out, runs, strict=True)
    ]
    if not any(saved):
        raise NotRepeatedError("no layers repeat themselves")
    return runs[saved.index(max(saved))]


def _run(forms: NodeForms, period: int) -> LayerRun | None:
    count = len(forms.body) - period
    first, last = longest([_alike(forms, index, period) for index in range(count)])
    if last - first < period:
        return None
    successor: dict[fx.Node, fx.Node] = {}
    for index in range(first, last):
        for a, b in zip(forms.reads[index], forms.reads[index + period], strict=True):
            if a is not b and a.op == "placeholder" and successor.setdefault(a, b) is not b:
                return None
    if len(set(successor.values())) < len(successor):
        return None
    return LayerRun(forms, first, last + period, period, successor)


def _alike(forms: NodeForms, index: int, period: int) -> bool:
    """Whether a node and the one a period after it do the same with what they read, and read the
    same, or what lies a period apart, or inputs of the graph.
    """
    if forms.forms[index] != forms.forms[index + period]:
        return False
    place = forms.place
    for a, b in zip(forms.reads[index], forms.reads[index + period], strict=True):
        apart = a in place and b in place and place[b] == place[a] + period
        if a is not b and not apart and not _same_input(a, b) and not _same_body(forms, a, b):
            return False
    return True


def _same_input(a: fx.Node, b: fx.Node) -> bool:
    """Whether both are inputs of the graph that look the same to a trace."""
    if not a.op == b.op == "placeholder":
        return False
    return looks(traced_value(a)) == looks(traced_value(b))


def _same_body(forms: NodeForms, a: fx.Node, b: fx.Node) -> bool:
    """Whether both are graphs that do the same: checkpointed regions, say."""
    one, other = forms.inside(a), forms.inside(b)
    return one is not None and one == other
