"""``Series``: inputs of a joint graph of which every layer reads one."""

from __future__ import annotations

import dataclasses

from torch import fx


@dataclasses.dataclass(frozen=True)
class Series:
    """Inputs of a joint graph that layers read one after another.

    Attributes:
        inputs: by layer, those of layers that were left out too.
        gap: the first layer that was left out.
        left_out: how many were.
    """

    inputs: list[fx.Node]
    gap: int
    left_out: int

    @property
    def traced(self) -> list[fx.Node]:
        """Of the layers that were traced."""
        return self.inputs[: self.gap] + self.inputs[self.gap + self.left_out :]

    @property
    def untraced(self) -> list[fx.Node]:
        """Of the layers that were left out."""
        return self.inputs[self.gap : self.gap + self.left_out]
