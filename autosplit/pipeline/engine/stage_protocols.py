"""Protocols of stages: the methods that the executor and the trainer call, and of the factory that
makes a stage from a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.boundaries import NamedLoss
from autosplit.pipeline.schedule.schedule import Action
from autosplit.stage import Stage


class ForwardStage(Protocol):
    """A stage that can run forward."""

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """Run F, and return the outputs; empties ``inputs``, so that each is freed at its last
        use.
        """


@runtime_checkable
class BackwardStage(ForwardStage, Protocol):
    """A stage that can run backward; see ``autosplit.stage.Stage``.

    Gradients are passed as lists with one entry per output or input; None for one without a
    gradient.

    Some methods are optional. They are looked up by name when a schedule needs them: ``recompute``
    runs F again from the inputs that ``forward(..., keep="inputs")`` has kept; ``held``,
    ``detach_held`` and ``attach_held`` move tensors of a microbatch.
    """

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Run I, and return the input gradients; empties ``output_grads``."""

    def backward_weight(self, microbatch: int) -> None:
        """Run W, and add the weight gradients to the stage's accumulators."""

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """Run I and W in one call, and return the input gradients; empties ``output_grads``."""


class TrainableStage(BackwardStage, Protocol):
    """A stage as the trainer uses it: a ``BackwardStage`` with specs of its outputs, and with
    gradients to publish.
    """

    @property
    def output_specs(self) -> Sequence[tuple[torch.Size, torch.dtype, bool]]:
        """(shape, dtype, whether it needs a gradient) of each output."""

    def publish(self) -> None:
        """Add the accumulated gradients to the parameters' ``.grad``, and drop them."""


class StageSharding(Protocol):
    """Gathers, frees and reduces the parameters of a rank's sharded stages."""

    def __contains__(self, stage: int) -> bool:
        """Whether a stage is sharded."""

    def agreeing(
        self, action: Action, stage: Stage, compute: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that runs an action of a stage, and agrees with other ranks on the
        parameters that it gathers.
        """

    def start_gather(self, stage: int) -> None:
        """Start the all-gather of the stage's parameters."""

    def finish_gather(self, stage: int) -> None:
        """Wait for the all-gather that ``start_gather`` started."""

    def free(self, stage: int) -> None:
        """Free the stage's gathered parameters."""

    def start_reduction(self, stage: int) -> None:
        """Start the reduce-scatter of the stage's published gradients."""


class StageFactory(Protocol):
    """Makes a stage from a module, for the trainer."""

    def __call__(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """Make a stage for ``module(*args)``.

        Args:
            module: the stage's module; the last stage's computes the loss.
            args: example inputs with true shapes and dtypes and arbitrary values. Those with
                ``requires_grad`` need a gradient.
            index: the stage's index in the pipeline.
        """


def unsupported_output(index: int, output_type: type) -> PipelineError:
    """The error for a stage that returns neither a tensor nor a tuple of tensors."""
    is_nested = issubclass(output_type, tuple | list)
    name = "nested tuple or list" if is_nested else output_type.__name__
    return PipelineError(
        f"stage {index} must return a tensor or a tuple of tensors, which the next stage takes in "
        f"this order; got a {name}"
    )


def flat_outputs(
    index: int, outputs: Any, expected_parts: tuple[str, ...] | None = None
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return (tensors that a stage's module returned, names of the parts of the loss).

    Args:
        index: the index of the stage.
        outputs: the result of the module.
        expected_parts: names of the parts in an earlier call; None for the first call.

    Raises:
        PipelineError: the module returned neither a tensor nor a tuple of tensors, or other parts
            of the loss than before.
    """
    names: tuple[str, ...] = ()
    if isinstance(outputs, NamedLoss):
        names, outputs = tuple(outputs.parts), [outputs.loss, *outputs.parts.values()]
    if expected_parts not in (None, names):
        raise PipelineError(
            f"loss_fn returned the parts {names}, and {expected_parts} in an earlier call: return "
            "the same names in each call"
        )
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    if not isinstance(outputs, tuple | list) or not all(
        isinstance(output, Tensor) for output in outputs
    ):
        raise unsupported_output(index, type(outputs))
    return list(outputs), names
