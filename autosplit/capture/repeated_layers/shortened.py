"""``Shortened``: a captured forward without most of its repeated layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from .layer_run import LayerRun, find_layers
from .node_forms import NodeForms, NotRepeatedError


@dataclasses.dataclass(frozen=True)
class Shortened:
    """A forward of which layers in the middle of a run were left out.

    Attributes:
        graph: takes all inputs of the whole forward; returns those of its results that are left.
        run: in the whole forward.
        start: index of the first node that was left out.
        left_out: how many layers were.
        series: inputs that layers read, one after another, by layer; every layer has one of each.
        results: nodes and constants that the whole forward returns, in the order of its leaves.
        kept: indices of those that the shortened one returns.
    """

    graph: fx.Graph
    run: LayerRun
    start: int
    left_out: int
    series: list[list[fx.Node]]
    results: list[Any]
    kept: list[int]

    @property
    def end(self) -> int:
        """Index behind the last node that was left out."""
        return self.start + self.left_out * self.run.period

    def is_left_out(self, node: Any) -> bool:
        """Whether a node of the whole forward is in a layer that was left out."""
        return self.start <= self.run.forms.place.get(node, -1) < self.end


def shorten(graph: fx.Graph, results: Sequence[Any], more: int = 0) -> Shortened:
    """Leave layers out of a captured forward.

    Args:
        graph: Dynamo's.
        results: nodes and constants that make up the leaves of its results.
        more: how many layers to keep beyond those that are needed as a rule.

    Raises:
        NotRepeatedError: it has no layers to leave out.
    """
    body = [node for node in graph.nodes if node.op in {"call_function", "call_method"}]
    forms = NodeForms(body, lambda node: node.meta.get("example_value"))
    run = find_layers(forms)
    kept = run.kept + more
    left_out = run.layers - kept
    if left_out <= 0:
        raise NotRepeatedError("no layers repeat themselves often enough")
    start = run.first + kept // 2 * run.period
    made = Shortened(fx.Graph(), run, start, left_out, _series(run), [*results], [])
    _copy(graph, made)
    _check_series(made)
    return made


def _series(run: LayerRun) -> list[list[fx.Node]]:
    found = []
    for head in run.successor.keys() - run.successor.values():
        chain = [head]
        while chain[-1] in run.successor:
            chain.append(run.successor[chain[-1]])
        found.append(chain)
    return found


def _check_series(short: Shortened) -> None:
    """Raise where an input of a layer that was left out is read elsewhere."""
    members = {each for chain in short.series for each in chain}
    for index in range(short.start, short.end):
        for read in short.run.forms.reads[index]:
            if read in members and not all(short.is_left_out(user) for user in read.users):
                raise NotRepeatedError(f"{read.name} of one layer is read elsewhere")
    for chain in short.series:
        unread = [all(short.is_left_out(user) for user in each.users) for each in chain]
        first = unread.index(True) if True in unread else 0
        if sum(unread[first : first + short.left_out]) < short.left_out or (
            sum(unread) > short.left_out
        ):
            raise NotRepeatedError(f"layers share inputs such as {chain[0].name}")


def _copy(graph: fx.Graph, short: Shortened) -> None:
    twin, run, place = short.graph, short.run, short.run.forms.place
    twin.set_codegen(graph._codegen)
    distance = short.end - short.start
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output" or short.is_left_out(node):
            continue
        if short.end <= place.get(node, -1) < run.last:
            # As in the first layer that was left out, of what is there read from before it.
            follows = iter(run.follows(place[node]))

            def kept(read: fx.Node, follows: Any = follows) -> fx.Node:
                before = next(follows) and place.get(read, short.end) < short.end
                return _known(copies, run.forms.body[place[read] - distance] if before else read)
        else:

            def kept(read: fx.Node, follows: Any = None) -> fx.Node:
                return _known(copies, read)

        copies[node] = twin.node_copy(node, kept)
    for index, each in enumerate(short.results):
        if not short.is_left_out(each):
            short.kept.append(index)
    left = [short.results[index] for index in short.kept]
    twin.output(tuple(copies[each] if isinstance(each, fx.Node) else each for each in left))


def _known(copies: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    if node not in copies:
        raise NotRepeatedError(f"{node.name} of one layer is read outside of the layers")
    return copies[node]
