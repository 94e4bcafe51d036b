"""Auxiliary losses that a forward leaves on its modules, as routers of experts do.

::

    F   outputs = module(inputs)        leaves aux_loss on some of its modules
        totals += aux_loss              for the log
    I   gradient of aux_loss = weight / M, whatever comes back for the outputs

After each forward the attributes are None again, so that a captured graph can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.own_loss import WithOwnLoss
from autosplit.ranks.control import Control


class WithAuxLosses(WithOwnLoss):
    """A stage that trains the auxiliary losses which its forward leaves on its modules.

    Args:
        module: the stage's module, with the loss if it is the last stage.
        weights: the weight of each loss, by the name of the attribute.
        device: the device of the stage.

    Attributes:
        weights: as passed.
        totals: the sum of each auxiliary loss over the stage's modules and calls of a step, in the
            order of ``weights``; float64.
    """

    totals: Tensor

    def __init__(
        self, module: nn.Module, weights: Mapping[str, float], device: torch.device
    ) -> None:
        super().__init__(module, device)
        self.weights = dict(weights)
        self._holders = {
            name: tuple(part for part in module.modules() if hasattr(part, name))
            for name in weights
        }
        for name, parts in self._holders.items():
            for part in parts:
                setattr(part, name, None)  # no value of an earlier call
        zeros = torch.zeros(len(weights), dtype=torch.float64, device=device)
        self.register_buffer("totals", zeros, persistent=False)

    @property
    def names(self) -> set[str]:
        """The names of auxiliary losses that are an attribute of some module of the stage."""
        return {name for name, parts in self._holders.items() if parts}

    def forward(self, *args: Tensor) -> Any:
        """Run the stage, and attach the auxiliary losses' gradients to its outputs."""
        outputs = self.module(*args)
        sums = {}
        for name, parts in self._holders.items():
            values = [getattr(part, name) for part in parts]
            for part in parts:
                setattr(part, name, None)
            if present := [value for value in values if value is not None]:
                sums[name] = _sum_of(name, present)
        if not sums:
            return outputs
        zero = torch.zeros_like(self.totals[0])
        row = [
            sums[name].detach().to(zero.dtype) if name in sums else zero for name in self.weights
        ]
        self.totals.add_(torch.stack(row))
        loss: Any = sum(self.weights[name] * value for name, value in sums.items())
        return self.train_loss(outputs, loss)


def start_aux_losses(stages: Iterable[WithAuxLosses], gradient: float) -> None:
    """Prepare the stages for a step: set the gradient, and set the totals to zero.

    Args:
        stages: this rank's stages.
        gradient: the gradient of each microbatch's weighted sum of auxiliary losses.
    """
    for stage in stages:
        stage.totals.zero_()
        stage.gradient.fill_(gradient)


def aux_sums(stages: Sequence[WithAuxLosses]) -> dict[str, float]:
    """Return the sums of this rank's auxiliary losses over stages and microbatches, by name."""
    totals = torch.stack([stage.totals for stage in stages]).sum(0).tolist()
    return dict(zip(stages[0].weights, totals, strict=True))


def check_holders(stages: Sequence[WithAuxLosses], names: Iterable[str], ranks: Control) -> None:
    """Check that each auxiliary loss is an attribute of some module; collective.

    Raises:
        PipelineError: names an auxiliary loss that is no attribute.
    """
    rows = ranks.gather([name for stage in stages for name in stage.names])
    missing = [name for name in names if not any(name in row for row in rows)]
    if missing:
        raise PipelineError(
            f"aux_losses has {missing[0]!r}, and no module of any stage has this attribute: set "
            f"self.{missing[0]} = None in the __init__ of the module whose forward sets it. "
            "Stages of a plan have graphs instead of modules: pass the whole model to the trainer"
        )


def _sum_of(name: str, values: list[Any]) -> Tensor:
    for value in values:
        if not isinstance(value, Tensor) or value.dim():
            raise PipelineError(
                f"the auxiliary loss {name!r} of a module must be a scalar tensor: reduce it, as "
                "by .mean(), before the forward sets it"
            )
    return torch.stack(values).sum()
