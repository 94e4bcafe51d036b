"""``WithOwnLoss``: a stage that trains a loss of its own, beside the gradients of its outputs.

In graphs, the gradient of the loss is attached to an output, and ``GradientDependence`` knows that
it comes whether or not the output gets a gradient. Autograd would run nothing behind an output
without a gradient, so stages without a graph start their backward from the loss itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autosplit.capture.diagnosis import Wrapper, named_module
from autosplit.passes.graph import OWN_GRADIENT
from autosplit.pipeline.engine.boundaries import NamedLoss


class _WithGradient(torch.autograd.Function):
    """Returns ``output``. In the backward, ``loss`` gets ``gradient`` as its gradient.

    Source: the scaler of auxiliary losses in Megatron-LM
    (megatron/core/transformer/moe/moe_utils.py).
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return grads[0], gradient.to(ctx.dtype, copy=True), None


class WithOwnLoss(Wrapper):
    """A stage's module that has a loss of its own.

    Args:
        module: the stage's module.
        device: the device of the stage.

    Attributes:
        is_root: whether the forward leaves its loss in ``root``, instead of attaching its gradient
            to an output.
        root: the loss of the last forward, if ``is_root``; None: it needs no gradient.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self.is_root = False
        self.root: Tensor | None = None
        one = torch.ones((), dtype=torch.float64, device=device)
        self.register_buffer(OWN_GRADIENT, one, persistent=False)

    @property
    def gradient(self) -> Tensor:
        """The derivative of the step's loss with respect to a microbatch's own loss, float64."""
        return self.get_buffer(OWN_GRADIENT)

    def train_loss(self, outputs: Any, loss: Tensor) -> Any:
        """Return the outputs. ``loss`` gets ``gradient`` in the backward.

        Raises:
            TypeError: no output can carry the gradient.
        """
        if not (torch.is_grad_enabled() and loss.requires_grad):
            return outputs
        if self.is_root:
            self.root = loss
            return outputs
        row = [outputs] if isinstance(outputs, Tensor) else [*outputs]
        places = [at for at, output in enumerate(row) if _carries(output)]
        if not places:  # Dynamo cannot construct errors of classes with an __init__
            raise TypeError(
                f"a stage ({type(named_module(self)).__name__}) has an auxiliary loss, and no "
                "output of floating point: return such an output from the stage's module"
            )
        trained = [at for at in places if row[at].requires_grad]
        place = (trained or places)[0]
        row[place] = _WithGradient.apply(row[place], loss, self.gradient)  # type: ignore[no-untyped-call]
        if isinstance(outputs, Tensor):
            return row[0]
        # Dynamo of torch 2.11 cannot return what NamedLoss._replace creates.
        return NamedLoss(row[0], outputs.parts) if isinstance(outputs, NamedLoss) else tuple(row)

    def take_root(self) -> Tensor | None:
        """Return ``root``, and forget it."""
        root, self.root = self.root, None
        return root


def _carries(output: Any) -> bool:
    return isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex())
