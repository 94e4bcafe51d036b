"""AOTAutograd's notes on the nodes of a joint graph -> the origins that passes read."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autosplit.passes.origin import ORIGIN, Origin

from .module_paths import frames

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_HALVES = {"is_forward": False, "is_backward": True}


def note_origins(graph: fx.Graph) -> None:
    """Say of every node where it comes from, in place of what was said before."""
    known: dict[Origin, Origin] = {}  # one object for all that are equal: they are kept on disk
    for node in graph.nodes:
        if node.op == "call_function":
            origin = _origin(node.meta)
            node.meta[ORIGIN] = known.setdefault(origin, origin)


def _origin(meta: dict[str, Any]) -> Origin:
    around = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return Origin(
        frames(around),
        _HALVES.get(meta.get("partitioner_tag", "")),
        meta.get("recompute") in _RECOMPUTED,
        meta.get("ac_graph_id"),
    )
