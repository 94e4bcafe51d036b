"""A trial of chosen stages before training: a few real steps, what a plan's times are checked
against. And the links between ranks.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.device import generators_kept
from autosplit.errors import PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.timing import measure_transfer, ring
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Span, median_durations
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.training.options import RunOptions, StageOptions, TrainerOptions
from autosplit.pipeline.training.stage_modules import StageSource
from autosplit.pipeline.training.stage_trainer import StageTrainer
from autosplit.planner.captured_model import WholeModel, device_of
from autosplit.planner.profile import BlockOptions, own_state
from autosplit.planner.stages import cut
from autosplit.torch_internals.pytree import tree_flatten

_TIMEOUT = 60.0


def measure_links() -> Transfer:
    """The links of each rank to the next and from the last to the first, with the messages that a
    trainer's stages send.

    Collective over the default process group; all ranks get the same.

    Raises:
        PlanError: there is only one rank.
    """
    if dist.get_world_size() < 2:
        raise PlanError("a link joins two ranks, and the default process group has one")
    device = device_of_group()
    groups = Groups(dist.get_world_size(), device, _TIMEOUT)
    try:
        return measure_transfer(groups, device, ring(groups.ranks))
    finally:
        groups.destroy()


Times = tuple[float, float, float]
Step = Callable[[], tuple[float, Sequence[Span]]]

_WARMUP = 4  # the first steps also find memory that later ones use again
_LEAST, _MOST = 5, 40  # timed steps


@dataclass(frozen=True)
class TrialRun:
    """Measured times of a trial run.

    Attributes:
        times: per stage, median seconds of F, I and W.
        step: median seconds of a step with its gradients, the messages between ranks and the
            waits for them; without the optimizer's update.
    """

    times: tuple[Times, ...]
    step: float


def can_run_trial(whole: WholeModel, schedule: Schedule) -> bool:
    """Whether this process, with those of its group, can run the schedule on the model's inputs."""
    ranks = len(schedule.ranks)
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks
    rows = [len(tensor) if tensor.dim() else 0 for tensor in _inputs(whole)]
    return (ranks == 1 or together) and bool(rows) and all(rows)


def run_trial(
    whole: WholeModel,
    firsts: Sequence[int],
    schedule: Schedule,
    options: BlockOptions,
    *,
    planned: Sequence[Times],
    seconds: float = 3.0,
) -> TrialRun:
    """Run a few steps of a model in stages, as a trainer will.

    Collective over the default process group, unless the schedule has one rank. The stages have
    buffers and gradients of their own, and random values for what is on the meta device; the model
    and the random number generators stay as they are. Without a loss in ``options``, what the
    model puts out is added up.

    Args:
        whole: the model.
        firsts: the first block of every stage but the first.
        schedule: what the ranks run.
        options: how stages are made.
        planned: seconds of F, I and W of each stage as planned, from which the shares of I and W
            are taken where the schedule runs both in one.
        seconds: how long the timed steps may take, if that is enough for a few.

    Returns:
        The same on all ranks.

    Raises:
        AutosplitError: a stage cannot be built or run, on this rank or another.
    """
    took: list[float] = []
    recorded: list[Sequence[Span]] = []
    with trial_steps(whole, firsts, schedule, options) as step:
        while len(took) < _LEAST or (len(took) < _MOST and sum(took) < seconds):
            slowest, spans = step()
            took.append(slowest)
            recorded.append(spans)
    return TrialRun(stage_times(recorded, planned), statistics.median(took))


@contextmanager
def trial_steps(
    whole: WholeModel, firsts: Sequence[int], schedule: Schedule, options: BlockOptions
) -> Iterator[Step]:
    """What ``run_trial`` times, warm: each call runs one step on all ranks.

    Arguments and errors are those of ``run_trial``. A step is a training step but for the
    optimizer's update: its batch and its gradients are tensors of its own, made anew.

    Yields:
        What gives the seconds of a step, those of the slowest rank, and what the stages did when.
    """
    device = options.device or device_of(whole.model)
    partition = cut(whole, firsts)

    def build(index: int) -> nn.Module:
        module = partition.sketch(index)
        own_state(module, device)
        return module

    stages = StageSource(partition.stages, build, partition.wiring, partition.shared, cut=True)
    training = TrainerOptions(
        ScheduleRequest(schedule, schedule.microbatches, len(schedule.ranks)),
        StageOptions(
            backend=options.split.backend,
            memory=options.split.memory,
            autocast=options.autocast,
        ),
        RunOptions(record=True),
    )
    loss_fn = options.loss_fn or stand_in_loss
    still = partial(torch.optim.SGD, lr=0.0)
    with (
        warnings.catch_warnings(),
        generators_kept(),
        StageTrainer(stages, loss_fn, still, training, device=device) as trainer,
    ):
        # Each rank has its own example, whose values do not matter here.
        warnings.filterwarnings("ignore", "the ranks were given different batches")

        def step() -> tuple[float, Sequence[Span]]:
            batch = _batch(whole, options, schedule.microbatches)
            start = time.perf_counter()
            trainer.forward_backward(batch)
            seconds = time.perf_counter() - start
            for module in trainer.modules.values():
                module.zero_grad(set_to_none=True)
            slowest = seconds if len(schedule.ranks) == 1 else float(max(gather(seconds)))
            return slowest, trainer.timeline().spans

        for _ in range(_WARMUP):
            step()
        yield step


def stand_in_loss(output: Any, targets: Any) -> Tensor:
    """The model's own loss where it puts one out, else the sum of all it puts out."""
    leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    scalars = [leaf for leaf in wanted if not leaf.dim()]
    return scalars[0] if scalars else torch.stack([leaf.sum() for leaf in wanted or leaves]).sum()


def _inputs(whole: WholeModel) -> list[Tensor]:
    leaves = tree_flatten((whole.args, whole.kwargs))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _batch(whole: WholeModel, options: BlockOptions, microbatches: int) -> Any:
    """Inputs and targets of a step: the example, once for each microbatch."""

    def repeated(tensor: Tensor) -> Tensor:
        real = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach()
        return torch.cat([real] * microbatches)

    inputs = tuple(map(repeated, _inputs(whole)))
    targets = () if options.loss_fn is None or options.targets is None else options.targets
    if isinstance(targets, Tensor):
        return inputs, repeated(targets)
    return inputs, tuple(map(repeated, targets))


def stage_times(steps: Sequence[Sequence[Span]], planned: Sequence[Times]) -> tuple[Times, ...]:
    """Per stage, median seconds of F, I and W of recorded steps; where a schedule runs I and W in
    one, they have the shares that are planned.
    """
    found = median_durations(steps)
    times = []
    for stage, (_, inputs, weights) in enumerate(planned):
        forward, first, second, both = (found.get((stage, ActionKind(kind))) for kind in "FIWB")
        if first is None and second is None and both is not None:
            share = inputs / (inputs + weights) if inputs + weights else 0.0
            first, second = both * share, both * (1.0 - share)
        times.append((forward or 0.0, first or 0.0, second or 0.0))
    return tuple(times)
