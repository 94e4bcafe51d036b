"""Buffer donation: saved tensors whose memory a backward graph may reuse.

A backward reads most of what the forward saved for the last time where it makes a value of the
same size. Written over the old one, the new value needs no memory of its own, and it goes where
the cache has just been. That may be done to what nobody else can reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import fx

from ..analysis.aliasing import fills_storage, producer, storage_root
from ..analysis.operators import overload
from ..graph import Kind, Role, inputs, outputs

_DONATED = "donated"


def donatable(forward: fx.Graph) -> set[Role]:
    """Roles of the saved tensors that only the backward can reach: not of inputs and
    state, nor of what is also an output or another saved value, nor of views of any of these.
    """
    returned = [(role, node) for role, node in outputs(forward) if isinstance(node, fx.Node)]
    holders = Counter(storage_root(node) for _, node in returned)
    return {
        role
        for role, node in returned
        if role.kind is Kind.SAVED
        and holders[storage_root(node)] == 1
        and fills_storage(node)
        # An operator says which of its results are views; any other callable does not.
        and overload(producer(node)) is not None
    }


def donate(roles: Collection[Role], *takers: fx.GraphModule | None) -> None:
    """Mark the inputs with these roles as donated, in every taker that does not return them."""
    for module in takers:
        if module is None:
            continue
        results = (node for _, node in outputs(module.graph) if isinstance(node, fx.Node))
        handed_on = {storage_root(node) for node in results}
        for role, node in inputs(module.graph).items():
            if role in roles and node not in handed_on:
                node.meta[_DONATED] = True


def is_donated(node: fx.Node) -> bool:
    """Whether a graph may write over the value of this input of it."""
    return bool(node.meta.get(_DONATED))
