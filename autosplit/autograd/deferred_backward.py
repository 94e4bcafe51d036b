"""What one backward leaves between I and W."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.saved_tensors import Handover, State


@dataclasses.dataclass(slots=True, eq=False)
class Deferred:
    """What one backward through one graph left for W.

    Attributes:
        functions: whose W it is.
        handover: the tensors that W needs.
        early: gradients that I made, in the order of ``functions.early_parameters``.
        state: parameters and buffers as they were in the forward.
        skipped: parameters that get no gradient: no output that they are in took part, or the
            gradient that theirs would be a part of is gone.
        backward: number of the backward, told by the autograd engine.
    """

    functions: SplitFunctions
    handover: Handover
    early: Sequence[Tensor]
    state: State
    skipped: frozenset[str]
    backward: int

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What it keeps alive, parameters and buffers left out."""
        return (*self.handover.tensors, *self.early)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that get a gradient: those of the forward, wherever they are now."""
        for name in self.functions.parameter_names:
            if name not in self.skipped:
                yield name, self.state[name]

    @property
    def parameters(self) -> list[Tensor]:
        """The same without their names."""
        names, state = self.functions.parameter_names, self.state
        return [state[name] for name in names if name not in self.skipped]

    @property
    def dense(self) -> bool:
        """Whether all gradients are known to be strided."""
        return self.functions.dependence.dense

    def drop(self, parameters: Collection[int]) -> None:
        """These (their ``id``) get no gradient any more."""
        found = [name for name, each in self.named_parameters() if id(each) in parameters]
        self.skipped = self.skipped.union(found)
