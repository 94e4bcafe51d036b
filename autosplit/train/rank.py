"""What each rank of a training run does. Every rank makes the same calls in the same order."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.errors import AutosplitError, PipelineError
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.pipeline.training.memory.limited_schedule import MemoryLimitError
from autosplit.planner.cuts.solve import CapError
from autosplit.planner.plan.partitioning import partition
from autosplit.planner.plan.plan import Plan

from .language_model import next_token_loss
from .preparation import Prepared, prepare
from .settings import TrainSettings
from .step_log import StepLog, StepRecord
from .summary import summary

MAX_GRAD_NORM = 1.0
# Behind the steps that compile, and in which a schedule for a memory limit is searched.
_WEIGHED = 5


def train_on_rank(settings: TrainSettings) -> str | AutosplitError:
    """Run a whole training; the report is the same on every rank.

    Returns:
        The report, or an error that all ranks found.
    """
    try:
        ready = prepare(settings)
    except AutosplitError as error:
        return error
    try:
        return _train(settings, ready)
    except (CapError, MemoryLimitError) as error:
        if settings.memory_limit is None:
            raise
        return PipelineError(str(error).replace("memory_limit=", "--memory-limit "))


def _train(settings: TrainSettings, ready: Prepared) -> str:
    plan = _plan(settings, ready)
    with plan.trainer(
        next_token_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=settings.learning_rate),
        max_grad_norm=MAX_GRAD_NORM,
        record=True,
    ) as trainer:
        run = _Run(settings, ready, trainer)
        torch.manual_seed(settings.seed + torch.distributed.get_rank())
        if ready.start:
            load_checkpoint(trainer, settings.checkpoint or "")
        run.train()
    return summary(plan, settings, run.records)


def _plan(settings: TrainSettings, ready: Prepared) -> Plan:
    """The model, cut for this run, and what its stages will start with."""
    model, windows = ready.language_model, ready.windows
    rows = settings.samples // settings.parts
    microbatch, targets = (each[:rows] for each in windows.of_step(0))
    plan = partition(
        model.model,
        microbatch,
        stages=settings.ranks,
        microbatches=settings.parts,
        schedule=settings.schedule,
        costs="estimate" if settings.estimate else "profile",
        memory_limit=settings.memory_limit,
        loss_fn=next_token_loss,
        targets=targets,
    )
    if model.weights is None:
        plan.initialise()
    else:
        plan.load_checkpoint(model.weights)
    return plan


@dataclass
class _Run:
    """The steps of one run.

    Attributes:
        records: of each step that was made.
    """

    settings: TrainSettings
    ready: Prepared
    trainer: PipelineTrainer
    records: list[StepRecord] = field(default_factory=list)
    _memory: tuple[int, ...] | None = None

    def train(self) -> None:
        """Run the steps that are left."""
        settings = self.settings
        log = StepLog(
            settings.history,
            self.ready.start,
            self.ready.end,
            speaks=torch.distributed.get_rank() == 0,
        )
        with log:
            for step in range(self.ready.start, self.ready.end):
                self.records.append(self._step(step))
                log.tell(self.records[-1])
                done = step + 1
                if settings.checkpoint is not None and (
                    done == self.ready.end or (settings.every and done % settings.every == 0)
                ):
                    save_checkpoint(
                        self.trainer, settings.checkpoint, step=done, extra=self.ready.identity
                    )

    def _step(self, step: int) -> StepRecord:
        """One step; its loss is no number only where training has failed.

        Raises:
            PipelineError: the loss is no number.
        """
        trainer = self.trainer
        weighs = step == min(self.ready.start + _WEIGHED, self.ready.end) - 1
        trainer.record = "memory" if weighs else True
        batch = self.ready.windows.of_step(step)
        start = time.perf_counter()
        loss = trainer.step(batch).mean().item()
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            raise PipelineError(
                f"the loss of step {step + 1} is {loss}: lower --lr {self.settings.learning_rate}"
            )
        if weighs:
            memory = trainer.memory()
            pairs = zip(memory.fixed, memory.peak_activations, strict=True)
            self._memory = tuple(fixed + peak for fixed, peak in pairs)
        return StepRecord(
            step + 1,
            loss,
            trainer.grad_norm or 0.0,
            seconds,
            batch[0].numel() / seconds,
            trainer.timeline().bubble_ratio(),
            self._memory,
        )
