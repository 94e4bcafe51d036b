"""``CheckpointRegions``: numbers of the regions that ``torch.utils.checkpoint`` recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .half import Half, JointForms
from .node_forms import UnlikeLayersError

_REGION = "ac_graph_id"  # AOTAutograd counts regions in the order of the forward


class CheckpointRegions:
    """Gives regions of layers that were left out numbers of their own.

    Args:
        joint: of the layers that were traced.
        halves: forward and backward.
    """

    def __init__(self, joint: JointForms, halves: Sequence[Half]) -> None:
        self._body = joint.forms.body
        found = {number for node in self._body if (number := _region(node)) is not None}
        self._order = {number: at for at, number in enumerate(sorted(found))}
        self._first = min(found, default=0)
        steps = {step for half in halves for step in self._steps(half)}
        if len(steps) > 1:
            raise UnlikeLayersError("layers have checkpointed regions of several kinds")
        self._step = steps.pop() if steps else 0

    def _steps(self, half: Half) -> set[int]:
        """By how much regions of one layer and the next are apart."""
        found = set()
        for index in range(half.start, half.end - half.period):
            one, other = _region(self._body[index]), _region(self._body[index + half.period])
            if (one is None) != (other is None):
                raise UnlikeLayersError("some layers are checkpointed, others are not")
            if one is not None and other is not None:
                apart = self._order[other] - self._order[one]
                found.add(apart if half.is_forward else -apart)
        return found

    def moved(self, meta: dict[str, Any], later: int) -> dict[str, Any]:
        """Notes of a node in a layer that comes so much later than the one it was traced in."""
        if meta.get(_REGION) is None:
            return meta
        number = self._first + self._order[meta[_REGION]] + later * self._step
        return meta | {_REGION: number}


def _region(node: fx.Node) -> int | None:
    number: int | None = node.meta.get(_REGION)
    return number
