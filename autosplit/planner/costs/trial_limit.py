"""Whether a trainer of chosen stages keeps a limit of memory, tried before it is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.device import generators_kept
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.stages import SplitStage
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.training.options import TrainerOptions
from autosplit.pipeline.training.stage_trainer import StageTrainer
from autosplit.pipeline.training.training_setup import TrainingSetup
from autosplit.planner.model.block_instance import StageOptions, device_of
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.model.stages import cut

from .trial_run import own_stages, stand_in_loss, trial_batch


def try_limit(
    whole: WholeModel,
    firsts: Sequence[int],
    schedule: Schedule,
    options: StageOptions,
    limit: int,
    *,
    optimizer_state: float,
    run: bool,
) -> tuple[float, ...]:
    """Have a trainer find a step within a limit, with all that it knows of memory: what operators
    take for themselves, messages, the batch.

    Collective, and with stages of its own, as ``run_trial``.

    Args:
        whole: the model.
        firsts: the first block of every stage but the first.
        schedule: what the ranks run where that keeps the limit.
        options: how stages are made.
        limit: bytes that a rank may hold.
        optimizer_state: bytes that the optimizer keeps for each of parameters.
        run: whether to run steps until what was found has been measured; else nothing is run but
            each distinct operator.

    Returns:
        Per rank, the most bytes that it holds in a step.

    Raises:
        MemoryLimitError: nothing was found that keeps the limit.
    """
    device = options.device or device_of(whole.model)
    order = without_memory(schedule)
    split = options.split
    training = TrainerOptions(
        ScheduleRequest(order, order.microbatches, len(order.ranks)),
        SplitStage(split.backend, split.memory),
        autocast=options.autocast,
        memory_limit=limit,
    )
    stages = own_stages(cut(whole, firsts), device)
    setup = TrainingSetup.of(stages, options.loss_fn or stand_in_loss, training)
    batch = trial_batch(whole, options, order.microbatches)
    keeping = partial(_Keeping, share=optimizer_state)
    with (
        warnings.catch_warnings(),
        generators_kept(),
        StageTrainer(setup, keeping, training, device=device) as trainer,
    ):
        # Each rank has its own example, whose values do not matter here.
        warnings.filterwarnings("ignore", "the ranks were given different batches")
        while run and not trainer.settled:
            trainer.forward_backward(batch)
            for module in trainer.modules.values():
                module.zero_grad(set_to_none=True)
        memory = trainer.predict_memory(batch)
    pairs = zip(memory.fixed, memory.predicted, strict=True)
    return tuple(float(fixed + (moving or 0)) for fixed, moving in pairs)


def without_memory(schedule: Schedule) -> Schedule:
    """The order alone: a trainer within a limit finds measures by what it measures."""
    rows = (tuple(a for a in row if not a.kind.is_memory) for row in schedule.ranks)
    return replace(schedule, ranks=tuple(rows))


class _Keeping(torch.optim.Optimizer):
    """Moves nothing, and keeps so many bytes for each of parameters, and a count for each."""

    def __init__(self, parameters: Iterable[nn.Parameter], share: float) -> None:
        super().__init__(parameters, {"share": share})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                size = round(group["share"] * parameter.numel())
                self.state[parameter] = {
                    "kept": parameter.new_zeros(size),
                    "count": torch.zeros(()),
                }
