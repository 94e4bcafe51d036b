"""One architecture: its configuration, the class that is built from it, and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from ..subject import Loss, Subject, projection

Inputs = Callable[[], dict[str, Any]]
Prepare = Callable[[Any], None]


def nothing(model: Any) -> None:
    """The model stays as its configuration makes it."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Attributes:
    model_type: as Hugging Face calls it.
    family: the ``Auto...`` class that builds the model.
    config: sizes.
    inputs: keyword arguments of one microbatch.
    can_tie: examined with the embedding tied to the head and without.
    variant: tells two rows of one model type apart.
    prepare: called with the new model.
    """

    model_type: str
    family: Any
    config: dict[str, Any]
    inputs: Inputs
    can_tie: bool = False
    variant: str = ""
    prepare: Prepare = nothing

    def subject(self, tied: bool | None, training: bool) -> Subject:
        tying = {} if tied is None else {"tie_word_embeddings": tied}

        def build() -> nn.Module:
            config = AutoConfig.for_model(self.model_type, **{**self.config, **tying})
            model: nn.Module = self.family.from_config(config)
            self.prepare(model)
            return model.train(training)

        words = [self.model_type, self.variant]
        words += [] if tied is None else ["tied" if tied else "untied"]
        words += ["train" if training else "eval"]
        loss: Loss = own_loss if "labels" in self.inputs() else projection
        return Subject(" ".join(filter(None, words)), build, lambda: ((), self.inputs()), loss)


def own_loss(output: Any, generator: torch.Generator) -> Tensor:
    """The loss that the model computes from its labels."""
    loss: Tensor = output["loss"]
    return loss
