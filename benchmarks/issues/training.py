"""Steps of autosplit's own engine; only the ranks of autosplit import this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autosplit.pipeline import PipelineTrainer, RunOptions

from . import gradients
from .gradients import Gradients, Loss, mean_square


class Trainer:
    """A trainer that only shows its gradients: its optimizer moves nothing."""

    def __init__(
        self,
        stages: Any,
        microbatches: int,
        loss_fn: Loss = mean_square,
        named: Mapping[str, nn.Parameter] | None = None,
        **options: Any,
    ) -> None:
        """A trainer.

        Args:
            stages: all modules, of which this rank takes its own, or a model that is cut.
            microbatches: M.
            loss_fn: of a microbatch.
            named: the parameters to look at; None: those of all modules.
            options: further ones of PipelineTrainer.
        """
        self._named = gradients.named(dict(enumerate(stages))) if named is None else named
        self._found: Gradients = {}
        self._trainer = PipelineTrainer(
            stages,
            loss_fn,
            self._optimizer,
            microbatches=microbatches,
            run_options=RunOptions(timeout=60.0),
            **options,
        )

    def step(self, batch: tuple[Any, Any]) -> Gradients:
        """Gradients of this rank's stages after a step of a batch."""
        self._trainer.step(batch)
        return self._found

    def _optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        names = {id(parameter): name for name, parameter in self._named.items()}
        mine = {names[id(p)]: p for p in parameters if id(p) in names}
        optimizer = torch.optim.SGD(parameters, lr=0.0)

        def look(*_: object) -> None:
            self._found = {
                name: None if p.grad is None else p.grad.detach().clone()
                for name, p in mine.items()
            }

        optimizer.register_step_pre_hook(look)
        return optimizer

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.close()
