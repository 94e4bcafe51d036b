"""Reports of a trainer: its schedule, and metrics, timeline and memory of its last step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from autosplit.errors import PipelineError
from autosplit.mesh.costs import Link
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.engine.stage_factory import traced
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import Timeline
from autosplit.ranks.session import RankSession
from autosplit.text.progress import working
from autosplit.trainer.auditing import Auditor
from autosplit.trainer.batches import Batch
from autosplit.trainer.options import Record, check_record
from autosplit.trainer.report_page import (
    RankReport,
    boundary_rows,
    largest,
    page,
    parameter_rows,
    stages_text,
)
from autosplit.trainer.runner import Runner
from autosplit.trainer.step_metrics import (
    StepFigures,
    device_peak,
    learning_rates,
    peak_rate,
    whole_mesh,
)
from autosplit.trainer.trainer_options import TrainerOptions

T = TypeVar("T")


class StepReports(RankSession):
    """The reports of a trainer on its steps. Users may call its methods between two steps.

    Args:
        layout: the ranks.
        options: the trainer's options.
        device: the device of this rank.

    Attributes:
        grad_scaler: scales the losses; None without loss scaling.
    """

    _runner: Runner  # set when the modules are built
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    modules: Mapping[int, nn.Module]

    def __init__(self, layout: RankLayout, options: TrainerOptions, device: torch.device) -> None:
        self._figures = StepFigures()
        self._drops_nonfinite = options.run.on_nonfinite == "skip"
        self.grad_scaler = options.run.scaler
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
    def auditor(self) -> Auditor | None:
        """The period of audits, the actions that have none, and marks; None without ``audit``."""
        return self._runner.auditor

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

    def metrics(
        self,
        *,
        tokens: int | None = None,
        peak_flops: float | str | None = None,
        mesh: bool = False,
    ) -> dict[str, float]:
        """Metrics of the last ``step`` (or ``forward_backward``), for a logger.

        One rank may call it alone, unless ``mesh`` is set. It adds no cost to a step. A
        ``step_async`` has metrics only with ``max_grad_norm`` or ``nonfinite="skip"``, which wait
        for its losses before the optimizer moves; ``seconds`` is then the time of the call.

        Args:
            tokens: the number of tokens in this pipeline's batch; None: the elements of the first
                tensor of integers among its inputs.
            peak_flops: the peak FLOP/s of a device, or its name, such as ``"h100"``, for ``"mfu"``.
            mesh: whether to combine the metrics of all ranks: rates are summed, times and bytes are
                the largest of any rank, and other metrics are means. The call is then collective.

        Returns:
            Numbers by name, of this rank and its pipeline unless ``mesh`` is set:

            - ``"loss"`` and the names of the loss's parts: the means over the batches of all
              replicas.
            - ``"seconds"``: the time of the step, with the optimizer.
            - ``"samples_per_s"``, ``"tokens_per_s"``: of this pipeline's batch.
            - ``"flops_per_s"``: floating-point operations of this rank's stages, forward and
              backward, per second; recomputation does not count. Only if all microbatches have the
              same sizes.
            - ``"mfu"``: ``"flops_per_s"`` over ``peak_flops``, the model FLOPs utilisation of PaLM
              (arXiv 2204.02311), Appendix B; only with ``peak_flops``.
            - ``"grad_norm"``: only with ``max_grad_norm``.
            - ``"skipped"``: the number of steps that ``nonfinite="skip"`` or a ``grad_scaler`` has
              dropped so far.
            - ``"scale"``: the scale of the next step's losses; only with ``grad_scaler``.
            - ``"marks"``: the number of differences that audits of all ranks have marked so far;
              only with ``audit``.
            - ``"lr"``: the learning rate; ``"lr/0"``, ``"lr/1"`` ... where parameter groups differ.
            - ``"idle"``: the share of forward and backward in which this rank computed nothing,
              equal to ``timeline().bubble_ratio(rank)``; only with ``record``.
            - ``"peak_memory"``: the most bytes that this rank held; only with ``record="memory"``.
            - ``"device_peak_memory"``: the most bytes that an accelerator's allocator has held.

        Raises:
            PipelineError: there was no step yet, the last step was a ``step_async`` that did not
                wait for the losses, or ``peak_flops`` is unknown.
        """
        peak = None if peak_flops is None else peak_rate(peak_flops)
        metrics = self._local_metrics(tokens)
        if peak is not None and "flops_per_s" in metrics:
            metrics["mfu"] = metrics["flops_per_s"] / peak
        if not mesh:
            return metrics
        with self._guard.during("gathering metrics"):
            rows = self._groups.everybody.gather(metrics)
        return whole_mesh(rows, len(self._groups.layout.pipelines))

    def _local_metrics(self, tokens: int | None) -> dict[str, float]:
        """Compute the metrics of this rank."""
        step, peak = self._runner.last_step, self._runner.memory.recorded_peak
        figures, seconds = self._figures, self._figures.seconds
        if figures.reduction is None or step is None:
            raise PipelineError(
                "there are no metrics of the last step: call step(...) first. step_async(...) has "
                "them with max_grad_norm or nonfinite='skip' only; else use its wait(), which "
                "returns the losses"
            )
        metrics = figures.reduction.means() | {"seconds": seconds}
        counts = step.counts if tokens is None else step.counts | {"tokens": tokens}
        for name, count in counts.items():
            metrics[f"{name}_per_s"] = count / seconds
        if step.functions:
            metrics["flops_per_s"] = step.flops * self.schedule.microbatches / seconds
        if figures.norm is not None:
            metrics["grad_norm"] = figures.norm
        if self._drops_nonfinite:
            metrics["skipped"] = float(figures.skipped)
        if self.auditor is not None:
            metrics["marks"] = float(len(self.auditor.marks))
        if self.grad_scaler is not None:
            metrics["scale"] = self.grad_scaler.get_scale()
        metrics |= learning_rates(self.optimizer)
        if self._runner.spans:
            spans = tuple(self._runner.spans)
            timeline = Timeline(self._groups.ranks, spans, bounds=figures.reduction.bounds())
            metrics["idle"] = timeline.bubble_ratio(self.rank)
        if peak is not None:
            metrics["peak_memory"] = float(peak)
        if self.device.type != "cpu":
            metrics |= device_peak(self.device)
        return metrics

    def progress(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, and show steps, loss, rate and time left on rank 0: in a bar on a
        terminal, elsewhere in a line every 30 seconds::

            for inputs, targets in trainer.progress(batches):
                trainer.step((inputs, targets))

        Args:
            batches: any iterable; if it has a length, the time left is known.
        """
        total = len(batches) if isinstance(batches, Sized) else None
        with working("training", total, unit="step") as progress:
            for batch in batches:
                yield batch
                progress.advance(self._note)

    def _note(self) -> str:
        """Return text with the loss and the rate of the last step; a number that is unknown is left
        out.
        """
        step = self._runner.last_step
        reduction, seconds = self._figures.reduction, self._figures.seconds
        if reduction is None or step is None:
            return ""
        text, counts = f"loss {reduction.means()['loss']:.4g}", step.counts
        unit = next((name for name in ("tokens", "samples") if name in counts), None)
        if unit is None:
            return text
        return f"{text}, {counts[unit] / seconds:,.0f} {unit}/s"

    def report(self) -> str:
        """A page about the trainer and its last step; collective over the pipeline.

        The page has the stages of each rank; the bytes of parameters, gradients, optimizer, and of
        a microbatch between F, I and W; the largest tensors by name; after a recorded step, what
        each rank waited for; and the differences that audits have marked.

        Raises:
            PipelineError: there was no step yet.
        """
        step = self._runner.memory.step
        if step is None:
            raise PipelineError("there is nothing to report yet: call step(...) first")
        stages, modules = traced(self.stages), self.modules
        parameters = [t for at, module in modules.items() for t in parameter_rows(at, module)]
        kept = [t for at, stage in stages.items() for t in boundary_rows(at, stage.functions)]
        row = RankReport(
            stages_text(modules.items()),
            *self._runner.memory.fixed_by_owner(),
            saved=sum(tensor.bytes for tensor in kept if tensor.owner == "saved"),
            deferred=sum(tensor.bytes for tensor in kept if tensor.owner == "deferred"),
            peak=self._runner.memory.recorded_peak,
            largest=largest([*parameters, *kept]),
            spans=self._runner.spans,
        )
        with self._guard.during("gathering a report"):
            rows = self._groups.gather(row)
        marks = () if self.auditor is None else self.auditor.marks
        text = page(self.schedule, self._runner.dataflow, rows, self._runner.limits)
        return "\n\n".join([text, *marks])

    def timeline(self) -> Timeline:
        """The timeline of all ranks' actions and audits in the last step; collective.

        Times of different ranks can be compared only if the ranks run on one machine.

        Raises:
            PipelineError: the step was not recorded.
        """
        with self._guard.during("gathering the timeline"):
            if not self._runner.spans:
                raise PipelineError(
                    "no step was recorded: set record=True before a step, then call timeline()"
                )
            audits = [] if self.auditor is None else self.auditor.spans
            spans, again = zip(*self._groups.gather((self._runner.spans, audits)), strict=True)
        return Timeline(len(spans), (*chain(*spans),), audits=(*chain(*again),))

    def store_link(self) -> Link:
        """Measure the link of each rank to its offload target, and return the slowest link;
        collective.

        Call it between steps. A simulation accepts the result as ``Transfer.host``.

        Raises:
            PipelineError: no rank has an offload target.
        """
        with self._guard.during("measuring stores"):
            return self._runner.memory.host_link()

    def memory(self) -> StepMemory:
        """The bytes that each rank held in the last step, and its predicted peak; collective.

        The step must have run with ``record="memory"``. It counts the forward and the backward.
        ``limit_kept`` of the result says whether every rank kept within ``memory_limit``; ``str()``
        of the result has a line for each rank.

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
        return StepMemory.of(rows, self._runner.limits)

    def predict_memory(self, batch: Batch | None) -> StepMemory:
        """Predict the bytes that each rank holds in a step with this batch; collective.

        The stages for the batch are built and kept, as in a first step with the batch; the model
        does not run. Nothing is measured: ``peak_activations`` and ``bands`` are empty.

        Args:
            batch: as for ``step``.

        Raises:
            PipelineError: as for ``step``.
        """
        with self._guard.during("predicting the memory"):
            memory = self._runner.predict(batch)
            rows = self._groups.gather((memory.predicted(), memory.fixed_bytes()))
        peaks, fixed_by_rank = zip(*rows, strict=True)
        return StepMemory((), peaks, fixed_by_rank, (), self._runner.limits)
