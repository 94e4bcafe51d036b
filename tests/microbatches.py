"""Several microbatches through plain autograd, and through a stage."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import Stage
from tests.gradients import assert_rounded, assert_same_gradients
from tests.zoo import CASES


def reference(model: nn.Module, batches: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    """Adds gradients to ``.grad``; returns those of the inputs."""
    results = []
    for batch, grad in zip(batches, grads, strict=True):
        leaf = batch.clone()
        if leaf.is_floating_point():
            leaf.requires_grad_()
        model(leaf).backward(grad)
        results.append(leaf.grad)
    return results


class Twins:
    """A module as a stage, and a copy that stays as it is, for the same microbatches.

    Args:
        model: the module, or the name of one of ``tests.zoo``.
        batches: the microbatches, or how many of that name's.
        options: of the stage.
    """

    def __init__(
        self, model: nn.Module | str, batches: list[Tensor] | int = 3, **options: Any
    ) -> None:
        if isinstance(model, str):
            case = CASES[model]
            model = case.build()
            batches = [case.batch() for _ in range(batches)]  # type: ignore[arg-type]
        assert isinstance(batches, list)
        self.model, self.twin, self.batches = model, copy.deepcopy(model), batches
        example = batches[0].clone()
        example.requires_grad_(example.is_floating_point())
        self.stage = Stage(model, [example], **options)
        ((shape, self.dtype, _),) = self.stage.output_specs
        self.grads = [torch.randn(shape).to(self.dtype) for _ in batches]
        self.found: list[Tensor | None] = []

    def forward(self) -> list[Tensor]:
        """F of all."""
        return [self.stage.forward(m, [x.clone()])[0] for m, x in enumerate(self.batches)]

    def backward(self, *, whole: bool = False) -> None:
        """I, or B, of all."""
        run = self.stage.backward if whole else self.stage.backward_input
        results = [run(m, [grad.clone()])[0] for m, grad in enumerate(self.grads)]
        self.found = [item if item is None else item.clone() for item in results]

    def weights(self) -> None:
        """W of all, one after another."""
        for microbatch in range(len(self.batches)):
            self.stage.backward_weight(microbatch)

    def assert_alike(self, *, exact: bool = True) -> None:
        """Input gradients and, as published, all others are autograd's."""
        expected = reference(self.twin, self.batches, self.grads)
        for mine, theirs in zip(self.found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs)
        self.stage.publish()
        assert_same_gradients(self.model, self.twin, exact=exact)

    def assert_rounded(self) -> None:
        """All gradients, as published, are autograd's but for rounding."""
        reference(self.twin, self.batches, self.grads)
        self.stage.publish()
        assert_rounded(self.model, self.twin)


def run_microbatches(stage: Stage, batches: list[Tensor], grads: list[Tensor]) -> None:
    """F, I and W of one after the other."""
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [grad.clone()])
        stage.backward_weight(m)
