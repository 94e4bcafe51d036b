"""The last stage's outputs as the loss function sees them, and the gradients that it gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.torch_internals.autograd.backward_task import without_autocast


class LossBoundary:
    """Outputs of one microbatch that a loss is computed of, with a gradient function that only
    takes their gradients down: the loss may write into them, as into what a module returns.

    Args:
        outputs: of the last stage.
        differentiable: places of those that need a gradient.
    """

    def __init__(self, outputs: Sequence[Any], differentiable: Sequence[int]) -> None:
        self._places = differentiable
        self._grads: list[Tensor | None] = []
        self.outputs = list(outputs)
        with torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True)
            taken = [outputs[at] for at in differentiable]
            made = _Taken.apply(self._grads, leaf, *taken) if taken else ()  # type: ignore[no-untyped-call]
        for at, output in zip(differentiable, made, strict=True):
            self.outputs[at] = output

    def gradients(self, stage: int, loss: Any) -> list[Tensor | None]:
        """Go back through the loss: gradients of the outputs that are tensors, None for those that
        it does not depend on. What else it depends on, such as parameters of its own, gets its
        gradient too.

        Raises:
            PipelineError: the loss is no scalar.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else loss
            raise PipelineError(
                f"stage {stage} is the last one: expected loss_fn(output, target) to give one "
                f"number as a tensor, got {came}; take the mean or the sum over the microbatch"
            )
        found: list[Tensor | None] = [None] * len(self.outputs)
        if loss.requires_grad:
            with without_autocast():
                torch.autograd.backward(loss)
            # Empty where it depends on none of them.
            for at, grad in zip(self._places, self._grads, strict=False):
                found[at] = grad
        for at in self._places:  # whoever asked for the outputs gets no graph with them
            if not self.outputs[at]._is_view():
                self.outputs[at].detach_()
        grads = [grad for grad, out in zip(found, self.outputs, strict=True) if _is_tensor(out)]
        self.outputs = []
        self._grads.clear()  # the loss holds its graph, and this with it, until the step ends
        return grads


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], _: Tensor, *outputs: Tensor) -> Any:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.grads[:] = grads
        return (None, None, *(None for _ in grads))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
