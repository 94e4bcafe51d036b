"""The modules of this rank's stages, completed with what a trainer adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autosplit.capture.size_rule import Leaf
from autosplit.errors import BatchError, CaptureError, PlanError
from autosplit.pipeline.engine.autocast import WithAutocast
from autosplit.ranks.groups import Groups
from autosplit.trainer.aux_losses import WithAuxLosses, check_holders
from autosplit.trainer.batches import Batch, MicrobatchList
from autosplit.trainer.stage_modules import LossFunction, Observer, WithLoss, check_trained
from autosplit.trainer.step_plans import StepPlan
from autosplit.trainer.trainer_options import TrainerOptions


class CompletedModules:
    """The modules of this rank's stages, completed::

        module -> with the loss, in the last stage -> with auxiliary losses, if any
               -> under autocast

    Args:
        modules: this rank's modules by stage.
        loss_fn: the loss, which runs at the end of the last stage.
        last: the last stage.
        is_cut: whether a whole model was cut into the modules.
        options: the trainer's options.
        groups: the trainer's process groups.
        device: the device of the stages.

    Attributes:
        observer: a function that an evaluation calls with the arguments of the loss, on the rank
            that computes the loss; None: nothing is called.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        loss_fn: LossFunction,
        last: int,
        is_cut: bool,
        options: TrainerOptions,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self._modules, self._loss_fn, self._last = modules, loss_fn, last
        self._is_cut = is_cut
        self._autocast, self._aux_losses = options.stages.autocast, options.stages.aux_losses
        self._groups, self._device = groups, device
        self._captured_sizes: dict[bool, set[tuple[Leaf, ...]]] = {False: set(), True: set()}
        self._completed: dict[tuple[bool, int | None], dict[int, nn.Module]] = {}
        self._has_checked_aux = False
        self.observer: Observer | None = None

    def complete(
        self, batch: Batch | MicrobatchList | None, *, evaluates: bool = False
    ) -> Mapping[int, nn.Module]:
        """Return this rank's modules by stage, with autocast and auxiliary losses. The last stage's
        module also computes the loss.

        The batch decides whether the loss gets one target or a tuple of targets, and their number.
        """
        if isinstance(batch, MicrobatchList):
            batch = next(iter(batch.batches or ()), None)
        targets = None if batch is None else batch[1]
        count = len(targets) if isinstance(targets, tuple | list) else None
        if targets is None:
            count = 0
        key = evaluates, count
        if key not in self._completed:
            modules, last = dict(self._modules), self._last
            if last in modules:
                check_trained(self._loss_fn, modules[last])
                observer = self._observe if evaluates else None
                modules[last] = WithLoss(modules[last], self._loss_fn, count, observer)
            if self._aux_losses:
                modules = {
                    stage: WithAuxLosses(module, self._aux_losses, self._device)
                    for stage, module in modules.items()
                }
            dtype = self._autocast
            if dtype is not None:
                modules = {
                    stage: WithAutocast(module, self._device, dtype)
                    for stage, module in modules.items()
                }
            self._completed[key] = modules
        return self._completed[key]

    def with_aux_losses(self, modules: Mapping[int, nn.Module]) -> list[WithAuxLosses]:
        """Return this rank's stages with auxiliary losses, without the wrapper of autocast; the
        first call is collective.

        Raises:
            PipelineError: no module of any stage has one of the losses.
        """
        if not self._aux_losses:
            return []
        inner = [m.module if isinstance(m, WithAutocast) else m for m in modules.values()]
        stages = [module for module in inner if isinstance(module, WithAuxLosses)]
        if not self._has_checked_aux:
            check_holders(stages, self._aux_losses, self._groups.everybody)
            self._has_checked_aux = True
        return stages

    def _observe(self, output: Any, targets: Any) -> None:
        """Pass the arguments of the loss to the observer, if there is one."""
        if self.observer is not None:
            self.observer(output, targets)

    def has_sizes(self, plan: StepPlan) -> bool:
        """Whether the modules can take a plan's microbatches without another capture of the model
        from which they are cut.
        """
        captured = self._captured_sizes[plan.evaluates]
        return not self._is_cut or captured.issuperset(s.inputs for s in plan.microbatches)

    def take_sizes(self, plan: StepPlan) -> None:
        """Capture the stages of a cut model for microbatches of new sizes; collective unless
        ``plan.is_built``.

        Raises:
            BatchError: on all ranks: the model cannot be captured, or cut, for these sizes.
        """
        if not self._is_cut or plan.is_built:
            return
        rows, refusal = dict.fromkeys(sizes.inputs for sizes in plan.microbatches), ""
        with self._groups.activity.during("capturing the model for other sizes", announced=True):
            for module in self._modules.values():
                training = module.training and not plan.evaluates
                take_sizes: Any = getattr(module, "take_sizes", None)  # other modules take any
                try:
                    if take_sizes is not None:
                        take_sizes([*rows], training=training)
                except (CaptureError, PlanError) as error:
                    refusal = refusal or str(error)
        refusals = self._groups.everybody.gather(refusal)
        if any(refusals):
            raise BatchError(next(filter(None, refusals)))
        self._captured_sizes[plan.evaluates].update(rows)
