"""What the executor asks of stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn


class ForwardStage(Protocol):
    """What a stage must offer to run forward."""

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs for ``inputs``; clears the list, so that each input dies at its last use."""
        ...


@runtime_checkable
class BackwardStage(ForwardStage, Protocol):
    """What a stage must offer to run backward; see ``autosplit.stage.Stage``.

    Gradients come and go as lists with one entry per output or input, None where there is none.
    """

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Input gradients; clears the list it is given."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """Add the weight gradients to the stage's accumulators."""
        ...

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """Both halves in one call; clears the list it is given."""
        ...


@runtime_checkable
class SlicedStage(BackwardStage, Protocol):
    """A stage whose W can be run in parts, one after another."""

    @property
    def slices(self) -> Sequence[object]:
        """One entry for each slice."""
        ...

    def backward_weight(self, microbatch: int, slice: int | None = None) -> None:
        """Add one slice of the weight gradients; None for all of them."""
        ...


@runtime_checkable
class PartlyPublishedStage(SlicedStage, Protocol):
    """A stage whose gradients can be taken slice by slice."""

    @property
    def slices(self) -> Sequence[Sequence[str]]:
        """For each slice the parameters, of ``module``, whose gradients it adds."""
        ...

    @property
    def module(self) -> nn.Module:
        """What it was made of."""
        ...

    def publish(self, names: Collection[str] | None = None) -> None:
        """Add the gradients of these parameters to their ``.grad`` and forget them; None: all."""
        ...


@runtime_checkable
class RecomputingStage(BackwardStage, Protocol):
    """A stage that can run F again, from its inputs."""

    def forward(
        self, microbatch: int, inputs: list[Tensor], keep: Literal["saved", "inputs"] = "saved"
    ) -> list[Tensor]:
        """As without ``keep``; with "inputs", nothing else is kept."""
        ...

    def recompute(self, microbatch: int) -> None:
        """Make again what F saves for the backward."""
        ...


class Shards(Protocol):
    """The stages of a rank whose parameters are sharded."""

    @property
    def stages(self) -> Collection[int]:
        """Which they are."""
        ...

    def gather(self, stage: int) -> None:
        """Gather the parameters of a stage."""
        ...

    def free(self, stage: int) -> None:
        """Free them."""
        ...
