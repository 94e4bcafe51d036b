"""A few real steps of chosen stages, before training: what a plan's times are checked against."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.device import generators_kept
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.engine.stages import SplitStage
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Span, median_durations
from autosplit.pipeline.training.options import TrainerOptions
from autosplit.pipeline.training.stage_modules import StageSource
from autosplit.pipeline.training.stage_trainer import StageTrainer
from autosplit.pipeline.training.training_setup import TrainingSetup
from autosplit.planner.model.block_instance import StageOptions, device_of, own_state
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.model.stages import Partition, cut
from autosplit.torch_internals.pytree import tree_flatten

from .timing import median_error

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
        noise: by what share that median may be off.
    """

    times: tuple[Times, ...]
    step: float
    noise: float = 0.0


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
    options: StageOptions,
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
    middle = statistics.median(took)
    return TrialRun(stage_times(recorded, planned), middle, median_error(took) / middle)


@contextmanager
def trial_steps(
    whole: WholeModel, firsts: Sequence[int], schedule: Schedule, options: StageOptions
) -> Iterator[Step]:
    """What ``run_trial`` times, warm: each call runs one step on all ranks.

    Arguments and errors are those of ``run_trial``. A step is a training step but for the
    optimizer's update: its batch and its gradients are tensors of its own, made anew.

    Yields:
        What gives the seconds of a step, those of the slowest rank, and what the stages did when.
    """
    ranks = len(schedule.ranks)
    device = options.device or device_of(whole.model)
    stages = own_stages(cut(whole, firsts), device)
    with generators_kept(), _trainer(stages, schedule, options, device) as run:

        def step() -> tuple[float, Sequence[Span]]:
            batch = trial_batch(whole, options, schedule.microbatches)
            return _slowest(_step(run, batch), ranks), run.timeline().spans

        with warnings.catch_warnings():
            # Each rank has its own example, whose values do not matter here.
            warnings.filterwarnings("ignore", "the ranks were given different batches")
            for _ in range(_WARMUP):
                step()
        yield step


def own_stages(partition: Partition, device: torch.device) -> StageSource:
    """The stages of a partition with state of their own."""

    def build(index: int) -> nn.Module:
        module = partition.sketch(index)
        own_state(module, device, blank=False, gradients=True)
        return module

    return StageSource(partition.stages, build, partition.wiring, partition.shared, cut=True)


def _trainer(
    stages: StageSource, schedule: Schedule, options: StageOptions, device: torch.device
) -> StageTrainer:
    request = ScheduleRequest(schedule, schedule.microbatches, len(schedule.ranks))
    split = options.split
    training = TrainerOptions(
        request, SplitStage(split.backend, split.memory), autocast=options.autocast
    )
    setup = TrainingSetup.of(stages, options.loss_fn or stand_in_loss, training)
    return StageTrainer(
        setup,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        training,
        device=device,
        record=True,
    )


def stand_in_loss(output: Any, targets: Any) -> Tensor:
    """The model's own loss where it puts one out, else the sum of all it puts out."""
    leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    scalars = [leaf for leaf in wanted if not leaf.dim()]
    return scalars[0] if scalars else torch.stack([leaf.sum() for leaf in wanted or leaves]).sum()


def _step(trainer: StageTrainer, batch: Any) -> float:
    """Seconds of one step on this rank."""
    start = time.perf_counter()
    trainer.forward_backward(batch)
    seconds = time.perf_counter() - start
    for module in trainer.modules.values():
        module.zero_grad(set_to_none=True)
    return seconds


def _slowest(seconds: float, ranks: int) -> float:
    """The longest that a rank took."""
    if ranks == 1:
        return seconds
    return float(max(gather(seconds)))


def _inputs(whole: WholeModel) -> list[Tensor]:
    leaves = tree_flatten((whole.args, whole.kwargs))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def trial_batch(whole: WholeModel, options: StageOptions, microbatches: int) -> Any:
    """Inputs and targets of a step: the example, once for each microbatch."""

    def repeated(tensor: Tensor) -> Tensor:
        real = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach()
        return torch.cat([real] * microbatches)

    inputs = tuple(map(repeated, _inputs(whole)))
    targets = options.targets
    if options.loss_fn is None or targets is None:
        return inputs, ()
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
