"""The reports of a trainer: its schedule, and figures, timeline and memory of its last step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.costs import Link
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import Timeline
from autosplit.ranks.session import RankSession
from autosplit.trainer.batches import Batch
from autosplit.trainer.options import Record, TrainerOptions, check_record
from autosplit.trainer.runner import Runner


@dataclass
class StepFigures:
    """The figures of a trainer's last step.

    Attributes:
        losses: the loss of each microbatch; None before the first step, and if the step did not
            wait for them.
        norm: the norm of the model's gradient; None if it is not computed.
        seconds: the time of the step.
        bounds: the first start and the last end of the actions that the pipeline recorded.
        skipped: the number of steps whose gradients were dropped so far.
    """

    losses: Tensor | None = None
    norm: float | None = None
    seconds: float = 0.0
    bounds: tuple[float, float] = (0.0, 0.0)
    skipped: int = 0


class StepReports(RankSession):
    """A session of ranks that run steps, and what a user may ask between two steps.

    Args:
        layout: the ranks.
        options: the trainer's options.
        device: the device of this rank.
    """

    _runner: Runner  # set when the modules are built

    def __init__(self, layout: RankLayout, options: TrainerOptions, device: torch.device) -> None:
        self._figures = StepFigures()
        self._drops_nonfinite = options.run.nonfinite == "skip"
        super().__init__(layout, options.mesh, device, options.run.timeout)

    @property
    def record(self) -> Record:
        """The record of each step, see ``RunOptions``; may be set between steps."""
        return self._runner.record

    @record.setter
    def record(self, record: Record) -> None:
        check_record(record)
        self._runner.record = record

    @property
    def schedule(self) -> Schedule:
        """The schedule of training steps; ``"auto"`` replaces it after the measured steps."""
        return self._runner.schedule

    @property
    def settled(self) -> bool:
        """Whether ``schedule`` is final: False while steps are measured for a better one."""
        return self._runner.settled

    @property
    def stages(self) -> Mapping[int, TrainableStage]:
        """This process's stages of the last step, by index; empty before the first step."""
        return self._runner.stages

    @property
    def grad_norm(self) -> float | None:
        """The norm of the model's gradient in the last step, before clipping; None without
        ``max_grad_norm``.
        """
        return self._figures.norm

    def metrics(self) -> dict[str, float]:
        """Metrics of the last ``step`` (or ``forward_backward``), for a logger.

        Not collective: one rank may call it alone. It adds no cost to a step. A ``step_async`` has
        metrics with ``max_grad_norm`` or ``nonfinite="skip"``, which know its losses before its
        optimizer moves; ``seconds`` is then the time of the call.

        Returns:
            Numbers by name. ``loss``: the mean over the batch. ``seconds``: the time of the step,
            with the optimizer. ``samples_per_s``: samples per second of this pipeline.
            ``grad_norm``: only with ``max_grad_norm``. ``skipped``: the number of steps that
            ``nonfinite="skip"`` has dropped so far, only with it. ``idle``: the share of forward
            and backward in which this rank computed nothing, equal to
            ``timeline().bubble_ratio(rank)``; only with ``record``. ``peak_memory``: the most bytes
            that this rank held; only with ``record="memory"``.

        Raises:
            PipelineError: there was no step yet, or the last one was a ``step_async`` that did
                not wait for the losses.
        """
        step, memory = self._runner.memory.step, self._runner.memory.recorder
        figures, seconds = self._figures, self._figures.seconds
        if figures.losses is None or step is None:
            raise PipelineError(
                "there are no metrics of the last step: call step(...) first. step_async(...) has "
                "them with max_grad_norm or nonfinite='skip' only; else use its wait(), which "
                "returns the losses"
            )
        metrics = {"loss": figures.losses.mean().item(), "seconds": seconds}
        rows = (meta.shape[0] for meta in step.metas.values() if meta.shape)
        if (samples := next(rows, None)) is not None:
            metrics["samples_per_s"] = samples / seconds
        if figures.norm is not None:
            metrics["grad_norm"] = figures.norm
        if self._drops_nonfinite:
            metrics["skipped"] = float(figures.skipped)
        if self._runner.spans:
            spans = tuple(self._runner.spans)
            timeline = Timeline(self._groups.ranks, spans, bounds=figures.bounds)
            metrics["idle"] = timeline.bubble_ratio(self.rank)
        if memory is not None:
            metrics["peak_memory"] = float(max(band.total for band in memory.bands()))
        return metrics

    def timeline(self) -> Timeline:
        """The timeline of all ranks' actions in the last step; collective.

        The times of different ranks are comparable only if the ranks run on one machine.

        Raises:
            PipelineError: the step was not recorded.
        """
        with self._guard.during("gathering the timeline"):
            if not self._runner.spans:
                raise PipelineError(
                    "no step was recorded: set record=True before a step, then call timeline()"
                )
            rows = self._groups.gather(self._runner.spans)
        return Timeline(len(rows), tuple(span for row in rows for span in row))

    def store_link(self) -> Link:
        """Measure the link of each rank to its store, and return the slowest; collective.

        Call it between steps. A simulation takes the result as ``Transfer.host``.

        Raises:
            PipelineError: no rank has a store.
        """
        with self._guard.during("measuring stores"):
            return self._runner.memory.host_link()

    def memory(self) -> StepMemory:
        """The bytes that each rank held in the last step, and its predicted peak; collective.

        The step must have run with ``record="memory"``. It counts the forward and the backward.

        Raises:
            PipelineError: the memory was not recorded.
        """
        with self._guard.during("gathering the memory"):
            memory = self._runner.memory
            if memory.recorder is None:
                raise PipelineError(
                    "the memory of the last step was not recorded: set record='memory' before a "
                    "step, then call memory(); predict_memory(batch) predicts it without a step"
                )
            rows = self._groups.gather((memory.recorder.bands(), memory.predicted()))
        return StepMemory.of(rows)

    def predict_memory(self, batch: Batch | None) -> StepMemory:
        """Predict the bytes that each rank holds in a step with this batch; collective.

        The stages for the batch are built and kept, as by a first step with it; the model does not
        run. Nothing is measured: ``peak_activations`` and ``bands`` are empty.

        Args:
            batch: as for ``step``.

        Raises:
            PipelineError: as for ``step``.
        """
        with self._guard.during("predicting the memory"):
            memory = self._runner.predict(batch)
            rows = self._groups.gather((memory.predicted(), memory.fixed_bytes()))
        peaks, fixed_by_rank = zip(*rows, strict=True)
        return StepMemory((), peaks, fixed_by_rank, ())
