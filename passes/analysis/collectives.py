"""Collectives: operators that begin an exchange between ranks, and those that wait for it.

Every rank has the same graphs, and runs the same collectives in the same order. They are pure: one
that nobody reads is dropped, by all ranks. What is under way cannot cross from one graph to
another, as it is the wait that makes it a value.
"""

from __future__ import annotations

import operator

from torch import fx

from .operators import EXCHANGE, overload

_WAIT = "wait_tensor"

# These begin on a copy of what they are given; others read it until they are waited for.
_COPYING = ("all_reduce", "broadcast")


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective, and is then its result."""
    op = overload(node)
    return op is not None and op.namespace == EXCHANGE and _name(node) == _WAIT


def is_start(node: fx.Node) -> bool:
    """Whether the node begins a collective."""
    op = overload(node)
    return op is not None and op.namespace == EXCHANGE and _name(node) != _WAIT


def is_exchange(node: fx.Node) -> bool:
    """Whether the node begins a collective or waits for one."""
    op = overload(node)
    return op is not None and op.namespace == EXCHANGE


def is_under_way(node: fx.Node) -> bool:
    """Whether the node's value is the unfinished result of a collective, or one of several."""
    if node.target is operator.getitem:
        maker = node.args[0]
        return isinstance(maker, fx.Node) and is_start(maker)
    return is_start(node)


def start_of(wait: fx.Node) -> fx.Node:
    """The collective that a node waits for; the node itself where another graph began it."""
    node = wait
    while not is_start(node):
        operands = node.all_input_nodes
        if not operands:
            return wait
        node = operands[0]
    return node


def read_until(wait: fx.Node) -> list[fx.Node]:
    """What a collective may read until this node has waited for it."""
    begun = start_of(wait)
    if begun is wait or _name(begun).startswith(_COPYING):
        return []
    return begun.all_input_nodes


def _name(node: fx.Node) -> str:
    op = overload(node)
    return "" if op is None else str(op._schema.name).partition("::")[2]
