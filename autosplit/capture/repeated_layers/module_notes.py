"""``ModuleNotes``: which modules a node is in, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from .node_forms import body_of
from .shortened import Shortened

_NOTES = ("nn_module_stack", "fwd_nn_module_stack")  # of a forward's node, and of a backward's


class ModuleNotes:
    """Takes a node's notes of the modules around it to another layer.

    Args:
        short: the forward, whose nodes say what modules every layer has.
    """

    def __init__(self, short: Shortened) -> None:
        self._short, run = short, short.run
        self._stacks = [[*_entries(node)] for node in run.forms.body]
        self._places: dict[Any, tuple[int, int]] = {}
        # A layer whose nodes were traced in part counts from those that were.
        for index in (*range(run.first, short.start), *range(short.end, run.last)):
            for depth, entry in enumerate(self._stacks[index]):
                self._places.setdefault(entry, (index, depth))

    def moved(self, meta: dict[str, Any], later: int) -> dict[str, Any]:
        """Notes of a node of the joint graph in a layer that comes so much later."""
        found = dict(meta)
        for note in _NOTES:
            if found.get(note):
                found[note] = dict(self._entry(each, later) for each in found[note].items())
        return found

    def _entry(self, entry: Any, later: int) -> Any:
        short = self._short
        index, depth = self._places.get(entry, (-1, 0))
        if index < 0:
            return entry
        traced_as = short.left_out if index >= short.end else 0
        there = index + (later - traced_as) * short.run.period
        if not short.run.first <= there < short.run.last or depth >= len(self._stacks[there]):
            return entry
        return self._stacks[there][depth]


def _entries(node: fx.Node) -> Iterator[Any]:
    """The modules around a node, and those around what is in a checkpointed region."""
    yield from (node.meta.get("nn_module_stack") or {}).items()
    for read in node.all_input_nodes:
        if (body := body_of(read)) is not None:
            for inner in body.graph.nodes:
                yield from _entries(inner)
