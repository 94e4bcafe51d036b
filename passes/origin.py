"""Where a node of a joint graph comes from, as capture noted it in ``node.meta["origin"]``."""

from __future__ import annotations

import dataclasses

from torch import fx

ORIGIN = "origin"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What tracing knew of a node.

    Attributes:
        modules: the modules around the user's statement, outermost first, by their names; those
            of the forward's statement where the node is its derivative. A later call of a module
            has its number behind it, as in ``block@1``.
        is_backward: whether the backward was being traced; None where it cannot be told.
        recomputed: whether the user asked for it to be recomputed (``torch.utils.checkpoint``).
        checkpoint: the call of ``checkpoint`` around it.
    """

    modules: tuple[str, ...] = ()
    is_backward: bool | None = None
    recomputed: bool = False
    checkpoint: int | None = None


_UNKNOWN = Origin()


def origin_of(node: fx.Node) -> Origin:
    """Where a node comes from; an origin that says nothing where nobody noted it."""
    origin = node.meta.get(ORIGIN, _UNKNOWN)
    if not isinstance(origin, Origin):
        raise TypeError(f"{node.name} carries {origin!r}, expected an Origin")
    return origin
