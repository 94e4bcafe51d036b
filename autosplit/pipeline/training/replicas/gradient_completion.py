"""Which gradients of a stage are complete with which slice of its W."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from autosplit.pipeline.engine.executor import SlicedStage
from autosplit.pipeline.engine.stages import TrainableStage

from .model_replicas import Completion


def completion_of(index: int, part: int, stage: TrainableStage, module: nn.Module) -> Completion:
    """The parameters of ``module`` whose gradients are complete with a slice: with the last one,
    all that no slice before it makes.

    Args:
        index: of the stage.
        part: which slice.
        stage: made of the module, or of the module and what the trainer adds to it.
        module: as the user knows it.
    """
    slices: Sequence[Sequence[str]] = ((),)
    face: dict[str, nn.Parameter] = {}
    if isinstance(stage, SlicedStage):
        slices, face = stage.slices, dict(stage.module.named_parameters())
    made = [{id(face[name]) for name in names if name in face} for names in slices]
    own = [*module.named_parameters()]
    if part < len(slices) - 1:
        return index, tuple(name for name, parameter in own if id(parameter) in made[part])
    before = set().union(*made[:-1])
    return index, tuple(name for name, parameter in own if id(parameter) not in before)


def publish_part(stage: TrainableStage, part: int) -> bool:
    """Move the gradients of a slice into ``.grad``; whether those are the last of the stage."""
    if isinstance(stage, SlicedStage):
        slices = stage.slices
        if part < len(slices) - 1:
            stage.publish(slices[part])
            return False
    stage.publish()
    return True
