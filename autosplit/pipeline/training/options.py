"""What may be said to a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.engine.execution.action_order import Order, as_scheduled, early_weights
from autosplit.pipeline.engine.execution.stage_assembly import StageFactory
from autosplit.pipeline.engine.messages.default_group import device_of_group
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.validate import validate

from .auto_schedule import first_schedule, usual_times


@dataclass(frozen=True)
class Options:
    """How a trainer runs; ``PipelineTrainer`` says what each means.

    Attributes:
        stage: options of ``split_stage``, None where the user left one out.

    Raises:
        PipelineError: a value that cannot be, or an option without effect.
    """

    microbatches: int
    schedule: str | Schedule
    split_backward: bool
    weights: str | None
    early_weights: bool
    shapes: int
    autocast: torch.dtype | None
    max_grad_norm: float | None
    ranks: int | None
    timeout: float
    stage: Mapping[str, Any]
    stage_factory: StageFactory | None

    def __post_init__(self) -> None:
        check_options(
            self.autocast, self.max_grad_norm, self.timeout, self.stage, self.stage_factory
        )
        if self.shapes < 1:
            raise PipelineError(
                f"shapes is how many shapes of batches may come, 1 or more: {self.shapes}"
            )
        check_slices(self.stage.get("slices"), self.early_weights)

    @property
    def late_input(self) -> bool:
        """Whether a stage that nobody waits for does all of its backward in W.

        Where Ws fill waits, the step is never longer for that, and forwards come earlier. 2BP's
        own placement has most Ws at the end, whatever they take: there the stage has an I of its
        own, as in the paper.
        """
        return self.weights != "2bp" or self.early_weights

    @property
    def given_stage(self) -> dict[str, Any]:
        """The stage options that the user gave."""
        return {name: value for name, value in self.stage.items() if value is not None}


def choose_schedule(
    schedule: str | Schedule,
    stages: int,
    microbatches: int,
    *,
    split_backward: bool,
    weights: str | None,
    ranks: int,
) -> Schedule:
    """Build a schedule by name, or take one that is there.

    Raises:
        ScheduleError: an unknown name, or a schedule that is not legal.
        PipelineError: a schedule that does not fit the other options.
    """
    if schedule == "auto":
        if weights is not None or not split_backward:
            raise PipelineError("weights and split_backward have no effect beside schedule='auto'")
        return first_schedule(stages, microbatches, ranks)
    if isinstance(schedule, str):
        return build(
            schedule,
            stages,
            microbatches,
            split_backward=split_backward,
            weights=weights,
            ranks=ranks,
            times=usual_times(stages) if split_backward and _fills(schedule, weights) else None,
        )
    if weights is not None or not split_backward:
        raise PipelineError(
            f"weights and split_backward have no effect beside the schedule {schedule.name!r}, "
            "which places every action itself"
        )
    has = (schedule.stages, schedule.microbatches, len(schedule.ranks))
    wanted = (stages, microbatches, ranks)
    if has != wanted:
        raise PipelineError(
            f"the schedule {schedule.name!r} is for (stages, microbatches, ranks) = {has}, "
            f"but the trainer has {wanted}"
        )
    validate(schedule)
    _check_both_run(schedule)
    return schedule


def _fills(schedule: str, weights: str | None) -> bool:
    known = SCHEDULES[schedule].weights if schedule in SCHEDULES else ()
    return "fill" in known and weights in (None, "fill")


def _check_both_run(schedule: Schedule) -> None:
    if schedule.mirror is not None and schedule.microbatches < 2:
        raise PipelineError(
            f"schedule {schedule.name!r} has two copies of the stages and one microbatch, so that "
            "one copy runs nothing: take 2 microbatches or more, or leave its mirror out"
        )


def choose_device(device: torch.device | str | None, processes: int) -> torch.device:
    """The device that the user named, else this process's GPU if the process group has NCCL."""
    if device is not None:
        found = torch.device(device)
        # Tensors have a number there, and are compared with this.
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        return found
    return device_of_group() if processes > 1 else torch.device("cpu")


def check_options(
    autocast: torch.dtype | None,
    max_grad_norm: float | None,
    timeout: float,
    stage_options: Mapping[str, object],
    stage_factory: StageFactory | None,
) -> None:
    """Refuse values that cannot be, and options without effect.

    Args:
        stage_options: those of ``split_stage``, None where the user left one out.

    Raises:
        PipelineError: says which, and what may be.
    """
    if autocast not in (None, torch.bfloat16):
        raise PipelineError(f"autocast is None or torch.bfloat16; got {autocast}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise PipelineError(f"max_grad_norm is a positive number or None; got {max_grad_norm}")
    if not timeout > 0:
        raise PipelineError(f"timeout is a positive number of seconds; got {timeout}")
    for name, value in stage_options.items():
        if value is not None and stage_factory is not None:
            raise PipelineError(
                f"{name}={value!r} has no effect beside stage_factory; pass one of the two"
            )


def check_slices(slices: int | None, early_weights: bool) -> None:
    """Refuse slices that nobody would run.

    Raises:
        PipelineError: says what is missing.
    """
    if slices is None:
        return
    if slices < 1:
        raise PipelineError(f"slices is a count, 1 or more; got {slices}")
    if not early_weights:
        raise PipelineError(f"slices={slices} has no effect without early_weights=True")


def check_joining(stage: Mapping[str, Any], schedule: Schedule) -> None:
    """Refuse to concatenate over microbatches where nothing could be.

    Args:
        stage: the stage options that the user gave.
        schedule: what is to be run.

    Raises:
        PipelineError: says what stands against it.
    """
    form, slices = stage.get("accumulation"), stage.get("slices", 1)
    if form != "concatenated":
        return
    if not schedule.split_backward:
        raise PipelineError(
            "accumulation='concatenated' joins weight gradients (W) of several microbatches, and a "
            "schedule with split_backward=False has no W: use accumulation='fused', or leave "
            "split_backward=False out"
        )
    if slices > 1:
        raise PipelineError(
            f"accumulation='concatenated' joins W of several microbatches, and slices={slices} "
            "cuts each: leave one of the two out"
        )


def choose_order(early: bool, schedule: Schedule, device: torch.device) -> Order:
    """In which order a rank takes up its actions.

    Raises:
        PipelineError: early weights where there are none, or where nobody can tell a wait.
    """
    if not early:
        return as_scheduled
    if not schedule.split_backward:
        raise PipelineError("early_weights has no effect with split_backward=False")
    if device.type != "cpu":
        raise PipelineError(f"early_weights is for stages on the CPU; got {device}")
    return early_weights
