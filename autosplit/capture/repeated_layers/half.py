"""``Half``: the forward or the backward of a joint graph, which repeats itself by layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .node_forms import NodeForms, NotRepeatedError, UnlikeLayersError, longest, spacings
from .series import Series
from .shortened import Shortened
from .trace_marks import mark_of

_LAYERS = 3  # that must come out alike, at least


class JointForms:
    """The nodes of a joint graph of a few layers, and the inputs that layers read.

    Args:
        forms: of the nodes that compute.
        series: inputs, by layer.
        short: the forward that was traced.

    Attributes:
        forms: of the nodes that compute.
        order: input -> its series, and its place among those of layers that were traced.
        marks: number of the node of that forward that each comes from, where it is known.
    """

    def __init__(self, forms: NodeForms, series: Sequence[Series], short: Shortened) -> None:
        self.forms, self._short = forms, short
        self.order = {node: (each, at) for each in series for at, node in enumerate(each.traced)}
        self.marks = [mark_of(node) for node in forms.body]
        run = short.run
        self._traced = range(run.first, run.last - short.left_out * run.period)

    def follow(self, one: int, other: int, step: int) -> bool:
        """Whether two nodes come from the same place of the run that was shortened, so many layers
        apart; of some nodes nothing is known.
        """
        a, b = self.marks[one], self.marks[other]
        if a is None or b is None:
            return a is b
        return a in self._traced and b in self._traced and b == a + step * self._short.run.period

    def mark(self, index: int, later: int, inside: bool) -> int | None:
        """The number of the node of the whole forward that a node comes from.

        Args:
            index: of the node.
            later: by how many layers it comes later than the one that was traced.
            inside: whether it is in a stretch that repeats itself.
        """
        mark, short = self.marks[index], self._short
        if mark is None:
            return None
        if not inside:
            later = short.left_out * (mark >= short.start)
        return mark + later * short.run.period


class Half:
    """One half of a joint graph, and the layers that were put into it.

    A node is *early* where it belongs to a layer before those that are put in, and *late* behind
    them. What it reads is counted from its own end: in terms of layers that it is later than the
    node that it was traced as.

    Args:
        joint: both halves.
        first: index of the half's first node.
        last: index behind its last one.
        layers: how many are to be put in.
        forward: the other half, for the backward.

    Attributes:
        period: nodes of a layer.
        start: index of the first node that repeats itself.
        end: index behind the last one.
        cut: index of the node before which layers are put in.
        nodes: the half's nodes, those put in among them.
    """

    def __init__(
        self, joint: JointForms, first: int, last: int, layers: int, forward: Half | None = None
    ) -> None:
        self.first, self.last, self.layers = first, last, layers
        self._joint, self._forward = joint, forward
        self.period, self.start, self.end = self._stretch()
        self.cut = self.start + (self.end - self.start) // self.period // 2 * self.period
        self.nodes: list[fx.Node] = joint.forms.body[first : self.cut]

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.end

    @property
    def is_forward(self) -> bool:
        """Whether this half is the forward."""
        return self._forward is None

    def owns(self, index: int) -> bool:
        """Whether a node is of this half."""
        return self.first <= index < self.last

    def later(self, index: int) -> int:
        """By how many layers a node that was traced comes later now."""
        before = index < self.cut
        return self.layers * (before if self._forward else not before)

    def at(self, index: int, later: int) -> fx.Node:
        """The node that a node of the run is in a layer that comes so much later."""
        steps = self.layers - later if self._forward else later
        place = index - self.first + steps * self.period
        if not 0 <= place < len(self.nodes):
            raise NotRepeatedError("a layer reads what is not there yet")
        return self.nodes[place]

    def follows(self, index: int) -> list[bool]:
        """Of each node that a node of the run reads: whether the next layer reads another one."""
        earlier = index if index + self.period < self.end else index - self.period
        one, other = (self._joint.forms.reads[at] for at in (earlier, earlier + self.period))
        return [a is not b for a, b in zip(one, other, strict=True)]

    def _stretch(self) -> tuple[int, int, int]:
        forms = self._joint.forms.forms[self.first : self.last]
        for period in spacings(forms):
            count = self.last - period
            matched = [self._alike(index, period) for index in range(self.first, count)]
            start, end = longest(matched)
            known = self._joint.marks[start + self.first : start + self.first + period]
            if end - start >= (_LAYERS - 1) * period and any(mark is not None for mark in known):
                return period, start + self.first, end + self.first + period
        raise UnlikeLayersError("layers do not come out alike")

    def _alike(self, index: int, period: int) -> bool:
        """Whether a node and the one a period after it do the same, and read the same, or what
        the layers that they are in have one of each.
        """
        forms = self._joint.forms
        if forms.forms[index] != forms.forms[index + period]:
            return False
        if not self._joint.follow(index, index + period, 1 if self.is_forward else -1):
            return False
        pairs = zip(forms.reads[index], forms.reads[index + period], strict=True)
        return all(a is b or self._corresponds(a, b, period) for a, b in pairs)

    def _corresponds(self, a: fx.Node, b: fx.Node, period: int) -> bool:
        order, place = self._joint.order, self._joint.forms.place
        step = -1 if self._forward else 1
        if a in order and b in order:
            return order[a][0] is order[b][0] and order[b][1] == order[a][1] + step
        if a not in place or b not in place:
            return False
        apart = place[b] - place[a]
        if self._forward is None or not self._forward.owns(place[a]):
            return apart == period
        return place[a] in self._forward and apart == -self._forward.period
