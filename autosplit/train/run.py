"""What each rank of a training run does. Every rank makes the same calls in the same order.

The report at the end of a training run: what was planned, and what came of it.

What is told of each step: a bar on a terminal, and a file of JSON lines.

Start the ranks of a training run, or be one of them under torchrun.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch
from tabulate import tabulate
from tqdm import tqdm

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.dump.tables import milliseconds
from autosplit.errors import AutosplitError, PipelineError
from autosplit.pipeline.engine.default_group import process_group
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.pipeline.training.memory_limit import MemoryLimitError
from autosplit.pipeline.training.options import RunOptions
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.plan import Plan, partition
from autosplit.planner.plan_tables import plan_table
from autosplit.text.figures import size_text
from autosplit.text.files import read_text, writing
from autosplit.train.language_model import TrainSettings, load_model, next_token_loss
from autosplit.train.preparation import Prepared, prepare, read_content

_EVERY = 30.0  # seconds between two lines about steps, where no terminal shows the bar


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step: how many steps the run has made with it.
        loss: the mean over the batch.
        grad_norm: of the whole model's gradient, before it was clipped.
        seconds: that the step took.
        tokens_per_s: tokens that it trained on, a second.
        bubble: idle time over total time of the ranks.
        memory: the most bytes that each rank has held, from the step on that measured it.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens_per_s: float
    bubble: float
    memory: Sequence[int] | None = None


class StepLog:
    """Tells of steps; on ranks other than 0 nothing happens.

    Args:
        file: of JSON lines, or None. Lines of later steps than ``start`` go: a run that is resumed
            makes them again.
        start: steps made before.
        steps: at which to end.
        speaks: whether this is the rank that tells.

    Raises:
        OutputError: the file cannot be written.
        PipelineError: a run is resumed whose file holds something else.
    """

    def __init__(self, file: Path | None, start: int, steps: int, *, speaks: bool) -> None:
        # None: shown on a terminal, not in a file.
        self._bar = tqdm(total=steps, initial=start, unit="step", disable=None if speaks else True)
        # Where no terminal shows the bar, a line now and then.
        self._lines = speaks and self._bar.disable
        self._steps, self._next = steps, 0.0
        self._stream: IO[str] | None = None
        if file is not None and speaks:
            kept = _lines_up_to(start, file)
            with writing(file):
                self._stream = file.open("w", encoding="utf-8")
                self._stream.writelines(kept)

    def tell(self, record: StepRecord) -> None:
        """Show a step and write it down."""
        self._bar.update(record.step - self._bar.n)
        self._bar.set_postfix_str(in_words(record))
        if self._lines and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            print(f"step {record.step} of {self._steps}: {in_words(record)}", file=sys.stderr)
        if self._stream is not None:
            self._stream.write(json.dumps(asdict(record)) + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self._stream is not None:
            self._stream.close()


def in_words(record: StepRecord) -> str:
    """What stands behind the bar."""
    said = (
        f"loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s, bubble {record.bubble:.0%}"
    )
    return said if record.memory is None else f"{said}, memory {size_text(max(record.memory))}"


def _lines_up_to(step: int, file: Path) -> list[str]:
    if step == 0 or not file.exists():
        return []
    try:
        lines = read_text(file, "the history", PipelineError).splitlines(keepends=True)
        return [line for line in lines if json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"--history {str(file)!r} is to go on behind step {step}, and is no history of "
            "autosplit train: give another file"
        ) from error


def summary(plan: Plan, settings: TrainSettings, records: Sequence[StepRecord]) -> str:
    """The stages, prediction beside measurement, and how the loss went.

    Args:
        plan: what was run.
        settings: what was asked for.
        records: of the steps that were made.
    """
    parts = [plan_table(plan), _measured(plan, records), _losses(records)]
    if settings.estimate:
        parts.insert(
            2,
            "planned by FLOPs and bytes (--estimate): right for how stages compare, by which they "
            "are cut; a step may well take several times as long",
        )
    if settings.checkpoint is not None:
        parts.append(
            f"checkpoint of step {records[-1].step}: {settings.checkpoint} (whole-model names: "
            "autosplit.checkpoint.read_checkpoint gives a state dict)"
        )
    return "\n\n".join(parts)


def _measured(plan: Plan, records: Sequence[StepRecord]) -> str:
    """A row for the step, the bubble, and the memory of each rank."""
    # The first step compiles.
    usual = records[1:] or records
    rows = [
        [
            "step ms",
            milliseconds(plan.predicted_step),
            milliseconds(statistics.median(each.seconds for each in usual)),
        ],
        [
            "bubble",
            f"{plan.bubble:.1%}",
            f"{statistics.median(each.bubble for each in usual):.1%}",
        ],
    ]
    memory = records[-1].memory or ()
    for rank, (foretold, held) in enumerate(zip(plan.peak_memory, memory, strict=True)):
        rows.append([f"memory, rank {rank}", size_text(round(foretold)), size_text(held)])
    headers = [f"{plan.schedule}, N={plan.stages}, M={plan.microbatches}", "planned", "measured"]
    return tabulate(rows, headers, colalign=("left", "right", "right"), disable_numparse=True)


def _losses(records: Sequence[StepRecord]) -> str:
    first, last = records[0], records[-1]
    tokens = sum(round(each.tokens_per_s * each.seconds) for each in records)
    speed = statistics.median(each.tokens_per_s for each in records[1:] or records)
    return (
        f"loss {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}; "
        f"{tokens:,} tokens, {speed:,.0f} a second"
    )


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
    except MemoryLimitError as error:
        if settings.memory_limit is None:
            raise
        return PipelineError(str(error).replace("memory_limit=", "--memory-limit "))


def _train(settings: TrainSettings, ready: Prepared) -> str:
    plan = _plan(settings, ready)
    with plan.trainer(
        next_token_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=settings.learning_rate),
        max_grad_norm=MAX_GRAD_NORM,
        run_options=RunOptions(record=True),
    ) as trainer:
        run = _Run(settings, ready, trainer)
        torch.manual_seed(settings.seed + torch.distributed.get_rank())
        begun = settings.checkpoint if ready.start else ready.language_model.weights
        if begun is not None:
            load_checkpoint(trainer, begun)
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
    plan.initialise()
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
                        self.trainer,
                        settings.checkpoint,
                        step=done,
                        extra=self.ready.windows.identity,
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


_TIMEOUT = 21 * 24 * 3600.0
"""Seconds that launched ranks may take. Waits of a store are milliseconds in 31 bits."""


def train(settings: TrainSettings) -> str | None:
    """Train on processes of this machine, or as one rank of a torchrun launch.

    Returns:
        The report; None on ranks other than 0 under torchrun.

    Raises:
        PipelineError: a model, text or option that cannot be used, or a rank failed.
        CheckpointError: the checkpoint cannot be read, or is of another run.
    """
    if "RANK" in os.environ:
        _check_world(settings)
        with process_group():
            report = _value(train_on_rank(settings))
        return report if os.environ["RANK"] == "0" else None
    read_content(settings.data)  # what is no text is known before any process starts
    if settings.ranks > (torch.cuda.device_count() or os.cpu_count() or 1):
        _check_blocks(settings)  # as many processes would take long to find out
    threads = max(1, (os.cpu_count() or 1) // settings.ranks)
    found = launch(train_on_rank, settings.ranks, (settings,), timeout=_TIMEOUT, threads=threads)
    return _value(found[0])


def _check_blocks(settings: TrainSettings) -> None:
    """Refuse more stages than the model has blocks.

    Raises:
        PlanError: it has not as many.
    """
    model, rows = load_model(settings).model, settings.samples // settings.parts
    ids = torch.zeros(rows, settings.length, dtype=torch.int64)
    WholeModel.capture(model, ids).check_stages(settings.ranks)


def _value(outcome: str | AutosplitError | None) -> str | None:
    """The report. A typed error came back as it is, for launch would wrap it."""
    if isinstance(outcome, AutosplitError):
        raise outcome
    return outcome


def _check_world(settings: TrainSettings) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != settings.ranks:
        raise PipelineError(
            f"torchrun started {world} processes, and --pp {settings.ranks} is for "
            f"{settings.ranks}: say --pp {world}, or start {settings.ranks} in all "
            "(--nproc-per-node times --nnodes)"
        )
