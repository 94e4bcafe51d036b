"""Products of a compiled graph that make weight gradients in I, undeferred.

A parameter whose gradient W computes enters a graph as itself. One that enters as a view, or as
something that another graph made of it, is an input like any other: I computes its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.operator_cost import flops
from autosplit.passes.graph import (
    FORWARD_OUTPUT,
    PRIMAL,
    ancestors,
    outputs,
    placeholders,
    role_of,
    tensor_of,
)

if TYPE_CHECKING:
    from .graph_outcome import Part


class WeightProducts:
    """Products of one graph by slot, the position among its tensor inputs in autograd's node."""

    def __init__(self, graphs: SplitGraphs) -> None:
        joint = graphs.joint.graph
        taken = [n for n in placeholders(joint) if role_of(n).kind in PRIMAL]
        self._slots = [role_of(node) for node in taken if tensor_of(node) is not None]
        self._results = [value for _, value in outputs(joint, *FORWARD_OUTPUT)]
        self._input_half = graphs.backward_input

    @classmethod
    def of(cls, part: Part) -> WeightProducts | None:
        """None for a graph without a backward."""
        return None if part.graphs is None else cls(part.graphs)

    def flops(self, slots: Sequence[int]) -> list[int]:
        """Floating-point operations of I for the gradient of each of these slots, of all that no
        gradient of another slot needs, nor W.
        """
        if self._input_half is None:
            return [0] * len(slots)
        wanted = [Role(Kind.INPUT_GRAD, self._slots[at].name) for at in slots]
        made: dict[Role, fx.Node] = {
            role: value
            for role, value in outputs(self._input_half.graph)
            if isinstance(value, fx.Node)
        }
        known = ancestors([value for role, value in made.items() if role not in wanted])
        found = []
        for role in wanted:
            own = ancestors([made[role]]) - known if role in made else set()
            found.append(sum(map(flops, own)))
            known |= own
        return found

    def sources(self, result: int) -> list[int]:
        """Slots that a result of the forward is computed from, buffers left out."""
        value = self._results[result] if result < len(self._results) else None
        if not isinstance(value, fx.Node):
            return []
        read = {role_of(node) for node in ancestors([value]) if node.op == "placeholder"}
        return [
            slot
            for slot, role in enumerate(self._slots)
            if role in read and role.kind is not Kind.BUFFER
        ]
