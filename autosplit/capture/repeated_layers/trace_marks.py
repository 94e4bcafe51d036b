"""Marks on the nodes of a graph that is traced: which node each of the joint graph comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx

from .node_forms import body_of

_NOTE, _MARK = "custom", "autosplit layer node"  # a note that tracing copies, backward included


@contextlib.contextmanager
def marked(graph: fx.Graph) -> Iterator[None]:
    """While a graph is traced, mark its nodes that compute by their number, and those of graphs
    inside by that of the node that runs them.
    """
    before: dict[fx.Node, Any] = {}
    computing = [node for node in graph.nodes if node.op in {"call_function", "call_method"}]
    try:
        for number, node in enumerate(computing):
            _mark(node, number, before)
        yield
    finally:
        for node, note in before.items():
            node.meta.pop(_NOTE, None)
            if note is not None:
                node.meta[_NOTE] = note


def _mark(node: fx.Node, number: int, before: dict[fx.Node, Any]) -> None:
    if node in before:  # of a graph inside that is run by several: where from cannot be told
        node.meta[_NOTE] = before[node] or {}
        return
    before[node] = node.meta.get(_NOTE)
    node.meta[_NOTE] = {**(before[node] or {}), _MARK: number}
    for read in node.all_input_nodes:
        body = body_of(read)
        for inner in body.graph.nodes if body is not None else ():
            _mark(inner, number, before)


def mark_of(node: fx.Node) -> int | None:
    """The number of the node that one of the joint graph comes from, where that is known."""
    number: int | None = (node.meta.get(_NOTE) or {}).get(_MARK)
    return number


def remarked(meta: dict[str, Any], number: int | None) -> dict[str, Any]:
    """Notes with another mark, or without one."""
    rest = {key: each for key, each in (meta.get(_NOTE) or {}).items() if key != _MARK}
    if number is not None:
        rest[_MARK] = number
    without = {key: each for key, each in meta.items() if key != _NOTE}
    return without | {_NOTE: rest} if rest else without
