"""The training steps of a trainer: forwards and backwards, then the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import RankLayout
from autosplit.trainer.agreement import StepReduction
from autosplit.trainer.batches import NOT_PASSED, Batch, BatchPart, Inputs, paired
from autosplit.trainer.loss_gradients import Weight
from autosplit.trainer.step_reports import StepReports
from autosplit.trainer.trained_parameters import TrainedParameters
from autosplit.trainer.trainer_options import TrainerOptions


class TrainingSteps(StepReports):
    """The training steps of a trainer.

    Args:
        layout: the ranks.
        options: the trainer's options.
        device: the device of this rank.
    """

    # Set when the modules are built.
    _trained: TrainedParameters
    _barrier: Callable[[], None] | None
    _around_step: Callable[[], AbstractContextManager[None]]

    def __init__(self, layout: RankLayout, options: TrainerOptions, device: torch.device) -> None:
        super().__init__(layout, options, device)
        self._max_norm, self._optimizer_moves = options.max_grad_norm, True
        self._accumulates = False  # whether ``forward_backward`` was the last training call

    def step(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = NOT_PASSED,
        *,
        microbatches: Sequence[Any] | None = None,
        weight: Weight | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run one training step: run all microbatches, clip gradients, call the optimizer, and
        clear gradients.

        No optimizer moves before every rank has all its gradients. If a rank fails, the trainer
        ends on all ranks.

        Args:
            batch: (inputs, targets), each a tensor or a tuple of tensors with the samples along
                dimension 0; a replica of the pipeline passes its own share. For a model that was
                cut with keyword inputs, the inputs are a dictionary. ``()`` stands for no targets.
                With ``target``, ``batch`` is only the inputs. The inputs are used on the ranks
                whose stages read them (in a chain, the first stage's rank), the targets on the last
                stage's rank; other ranks may pass None. An input that requires a gradient gets the
                gradient of the step's loss, as from ``backward()``, on the one rank whose stage
                reads it. Other ranks must pass it detached, or None.
            target: the targets, as in torch's pipelines: ``step(x, target=y)``. None on a rank that
                has no targets: ``step(x, target=None)``.
            microbatches: a list of (inputs, targets) in place of a batch that is cut: as many as
                there are, each of its own sizes. Inputs and targets may be any objects that hold
                tensors, with the same structure, dtypes and numbers of dimensions. Replicas may
                pass lists of different lengths. See docs/batches.md.
            weight: the weights of the microbatches, a positive number for each such as its count of
                tokens; or one number for all. The loss of the step is then the weighted mean over
                the microbatches of all replicas. Every rank passes the weights of its pipeline.
                None: equal weights.
            named: keyword inputs, for a model that was cut with them: ``step(input_ids=ids,
                target=y)``.

        Returns:
            The loss of each microbatch, shape [microbatches], on the CPU, the same on every rank of
            the pipeline. The loss of the step, to which the gradients belong, is their mean,
            weighted by ``weight``, over all replicas of the pipeline.

        Raises:
            BatchError: a rank refuses the batch: its tensors have different numbers of samples, a
                stage cannot take a microbatch, ranks passed batches of different shapes, or a
                weight is not a positive finite number. Nothing has run on any rank; the next step
                may follow.
            PipelineError: an error on any rank, a lost peer, or a timeout.
        """
        start = perf_counter()
        losses = self._run(batch, target, microbatches, weight, named, ends_step=True)
        if self._optimizer_moves:
            with self._guard.during("the optimizer step"):
                self._trained.step(self._max_norm, self._figures.norm, self._barrier)
        self._figures.seconds = perf_counter() - start
        return losses

    def step_async(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = NOT_PASSED,
        *,
        microbatches: Sequence[Any] | None = None,
        weight: Weight | None = None,
        **named: Tensor,
    ) -> StepReduction:
        """Run one training step without waiting for the other ranks at its end.

        A rank that has finished begins the next step, whose start fills the idle end of this step.
        Losses and weights equal those of ``step`` bit for bit. But an optimizer moves as soon as
        its own rank has all gradients. So after a failure, ranks may be one step apart, and a
        checkpoint must be loaded.

        With ``max_grad_norm``, or with ``RunOptions(nonfinite="skip")``, a rank waits until all
        ranks have their gradients, but not for other ranks' optimizers. With ``nonfinite="raise"``
        and without ``max_grad_norm``, a rank checks its own gradients before its optimizer moves,
        and ``wait()`` raises if gradients of other ranks are not finite.

        Args:
            batch: as for ``step``.
            target: as for ``step``.
            weight: as for ``step``.
            named: as for ``step``.

        Returns:
            The pending losses; their ``wait()`` returns the result of ``step``.

        Raises:
            BatchError: as for ``step``, if the inputs have a new shape.
            PipelineError: as for ``step``. If the inputs have a known shape, a refused batch raises
                it too, because other ranks have already begun.
        """
        start = perf_counter()
        with self._around_step():
            with self._guard.during("the forward and backward of step_async"):
                self._figures.reduction = None
                agreement = self._runner.train(
                    paired(batch, target, named, microbatches), weight, waits=False
                )
            waits = self._max_norm is not None or self._runner.flight is not None
            if waits or self._drops_nonfinite:
                self._finish_reduction(agreement, ends_step=True)
                self._figures.seconds = perf_counter() - start
            else:
                agreement.check_local()
                self._runner.backward_batch()
        if self._optimizer_moves:
            with self._guard.during("the optimizer step"):
                self._trained.step(self._max_norm, self._figures.norm)
        self._figures.seconds = perf_counter() - start
        return agreement

    def forward_backward(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = NOT_PASSED,
        *,
        microbatches: Sequence[Any] | None = None,
        weight: Weight | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run the schedule, and add the gradients of the mean loss to the parameters' ``.grad``.

        Arguments, result and errors are those of ``step``. Returns when all ranks are done.
        """
        return self._run(batch, target, microbatches, weight, named, ends_step=False)

    def _run(
        self,
        batch: Batch | Inputs | None,
        target: BatchPart | None,
        microbatches: Sequence[Any] | None,
        weight: Weight | None,
        named: dict[str, Tensor],
        *,
        ends_step: bool,
    ) -> Tensor:
        """Run the schedule, wait for all ranks, and return the losses; see ``step``."""
        start = perf_counter()
        with self._around_step():
            with self._guard.during("the forward and backward"):
                agreement = self._runner.train(paired(batch, target, named, microbatches), weight)
            losses = self._finish_reduction(agreement, ends_step=ends_step)
            self._figures.seconds = perf_counter() - start
        return losses

    def _finish_reduction(self, agreement: StepReduction, *, ends_step: bool) -> Tensor:
        """Wait for the losses of a batch and return them. Also decide, equally on all ranks,
        whether optimizers may move.

        Gradients that are not finite stay in ``.grad`` until the step ends. So the sums with later
        batches are not finite either, unless gradients are cleared in between.
        """
        figures, losses = self._figures, agreement.wait()
        figures.reduction = agreement
        if self._max_norm is not None:
            figures.norm = agreement.norm()
        self._optimizer_moves = agreement.finite
        if self._optimizer_moves:
            self._runner.backward_batch()
        self._accumulates = True
        if ends_step:
            self._end_step()
        return losses

    def _end_step(self) -> None:
        """Drop the step's gradients if not all are finite, and update the scale."""
        self._accumulates = False
        if not self._optimizer_moves:
            self._trained.drop_gradients()
            self._figures.skipped += 1
        if self.grad_scaler is not None:
            self._runner.losses.update_scale(self.grad_scaler, finite=self._optimizer_moves)

    def _watch_optimizer(self) -> None:
        """End a step that consists of ``forward_backward`` calls when the user calls the
        optimizer.
        """
        if self.optimizer is not None:
            with suppress(AttributeError):  # an object that wraps an optimizer may take no hooks
                hook = self.optimizer.register_step_pre_hook(self._end_own_step)
                self._releases.append(hook.remove)

    def _end_own_step(self, *_: object) -> None:
        """End the step before the user's own call of the optimizer.

        Raises:
            PipelineError: there is a ``grad_scaler``. A rank without an optimizer would not update
                its scale.
        """
        if not self._accumulates:
            return
        if self.grad_scaler is not None:
            raise PipelineError(
                "with grad_scaler, the trainer calls the optimizer, so that all ranks update the "
                "scale: pass the last batch of the step to trainer.step(...)"
            )
        self._end_step()
