"""What both ways train: one architecture, its batches, its loss and its optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import FAMILIES
from ..architectures.architecture import own_loss
from ..observe import Observed, seed_everything
from ..subject import Subject

STEPS = 3
MICROBATCHES = 4
LEARNING_RATE = 1e-3
_LOSSES = ("labels", "return_loss")  # what a model is given that computes its own

Inputs = dict[str, Any]


@functools.cache
def subjects() -> dict[str, tuple[str, Subject]]:
    """Name -> (family, subject): every architecture in train mode, its embedding tied to its head
    where its configuration has that by default.
    """
    found = {}
    for family, architectures in FAMILIES.items():
        for architecture in architectures:
            subject = architecture.subject(None, training=True)
            found[subject.name.removesuffix(" train")] = (family, subject)
    return found


class Lesson:
    """One architecture with everything that is drawn at random drawn: the same in every process.

    Attributes:
        model: new, in train mode.
        microbatches: the keyword inputs of each, by step.
    """

    def __init__(self, name: str) -> None:
        self.subject = subjects()[name][1]  # draws, when they are made
        seed_everything(0)
        self.model = self.subject.build()
        self.microbatches = [
            [_owned(self.subject.call()[1]) for _ in range(MICROBATCHES)] for _ in range(STEPS)
        ]

    @property
    def example(self) -> Inputs:
        return self.microbatches[0][0]

    def batch(self, step: int) -> dict[str, Tensor]:
        """The tensors of a step's microbatches, one after another."""
        parts = self.microbatches[step]
        names = [name for name, value in parts[0].items() if isinstance(value, Tensor)]
        return {name: torch.cat([part[name] for part in parts]) for name in names}

    def loss(self, output: Any, targets: Any = ()) -> Tensor:
        """What the model computes from its labels, if it is given any."""
        if self.subject.loss is own_loss or any(name in self.example for name in _LOSSES):
            loss: Tensor = output["loss"]
            return loss
        return _projection(output.values())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def gradients(model: nn.Module, step: int) -> Observed:
    """Of every parameter, under all its names."""
    return {
        f"gradient of {name} [{step}]": None if each.grad is None else each.grad.detach().clone()
        for name, each in model.named_parameters(remove_duplicate=False)
    }


def state(model: nn.Module, step: int) -> Observed:
    """Parameters and buffers behind a step, under all their names."""
    every = [*model.named_parameters(remove_duplicate=False)]
    every += [*model.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    return {f"{name} behind step {step}": each.detach().clone() for name, each in every}


def losses(values: Iterable[Tensor], step: int) -> Observed:
    return {f"output [{step}.{at}]": each.detach().clone() for at, each in enumerate(values)}


def _owned(inputs: Inputs) -> Inputs:
    """As people give them: inputs for which nobody asks for a gradient."""
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def _projection(values: Iterable[Any]) -> Tensor:
    """Every element of every output with a weight of its own."""
    terms = [
        (value * torch.arange(value.numel(), dtype=value.dtype).cos().view(value.shape)).sum()
        for value in values
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    return torch.stack(terms).sum()
