"""Several microbatches through plain autograd, and through a stage."""

from __future__ import annotations

from torch import Tensor, nn

from autosplit import Stage


def reference(model: nn.Module, batches: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    """Adds gradients to ``.grad``; returns those of the inputs."""
    found = []
    for batch, grad in zip(batches, grads, strict=True):
        leaf = batch.clone()
        if leaf.is_floating_point():
            leaf.requires_grad_()
        model(leaf).backward(grad)
        found.append(leaf.grad)
    return found


def run_microbatches(stage: Stage, batches: list[Tensor], grads: list[Tensor]) -> None:
    """F, I and W of one after the other."""
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [grad.clone()])
        stage.backward_weight(m)
