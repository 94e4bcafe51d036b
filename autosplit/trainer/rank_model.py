"""One rank's part of the model: its modules, and the reductions of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.schedule import BACKWARDS, Schedule
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.ranks.groups import Groups
from autosplit.stage import Stage
from autosplit.torch_internals.dtensor import is_dtensor, local_tensor, redistribute_gradient
from autosplit.torch_internals.gradients import scale_together
from autosplit.trainer.gradient_buckets import GradientBuckets, Wait
from autosplit.trainer.replicated_parameters import ReplicatedParameters
from autosplit.trainer.sharded_stages import ShardedStages
from autosplit.trainer.stage_modules import Holder, StageSource
from autosplit.trainer.stage_start import agree_on_start, build_seeded_modules
from autosplit.trainer.trained_parameters import OptimizerFunction, TrainedParameters

ShardFunction: TypeAlias = "Callable[[Mapping[int, nn.Module]], frozenset[int]]"
"""Shards a rank's stages, by index; returns the ``id`` of trained parameters that stay whole."""


class RankModel:
    """This rank's stage modules and their trained parameters.

    A step calls, in this order:

        checks                the user has not changed which parameters are trained
        reducing_gradients    around the actions: sums ``.grad`` over copies at its end
        post_step             buffers of replicas become equal

    Collective: all ranks must construct it together.

    Args:
        stages: the source of all stages.
        shared: groups of (stage, parameter name); each group is one tied parameter of the model.
        schedule: the schedule, whose placement says which rank has which stage.
        groups: the trainer's process groups.
        device: the device of the modules.
        synchronize: a function that waits until the device has finished.
        shard: shards the modules; None: the trainer shards nothing.

    Attributes:
        modules: this rank's modules by stage.
        trained: the parameters that need a gradient, with their optimizer.
        sharded: the stages that ``fully_shard`` has sharded.
        buckets: the buffers of the gradients that are reduced over copies.
        checks: functions to call before a step, which raise PipelineError.
        post_step: functions to call after the actions of a step.
        reduces: whether a step reduces gradients over copies of tied parameters or over other
            ranks.

    Raises:
        PipelineError: a stage is not a module; also raises the errors of ``ShardedStages`` and
            ``ReplicatedParameters``.
    """

    def __init__(
        self,
        stages: StageSource,
        shared: Sequence[Sequence[Holder]],
        schedule: Schedule,
        groups: Groups,
        device: torch.device,
        synchronize: Callable[[], None],
        shard: ShardFunction | None = None,
    ) -> None:
        modules, drew = build_seeded_modules(stages.build, schedule.stages_on(groups.rank), device)
        self.modules, self._has_model_names = modules, stages.wiring is not None
        self._groups = groups
        self._first_holders = {tuple(at): holders[0] for holders in shared for at in holders}
        for index, module in modules.items():
            if not isinstance(module, nn.Module):
                raise PipelineError(
                    f"stage {index} must be an nn.Module; got a {type(module).__name__}"
                )
            _check_tied(index, module, shared)
            modules[index] = module.to(device)
        agree_on_start(modules, shared, groups, drew=drew)
        whole = frozenset[int]() if shard is None else shard(modules)
        self.sharded = sharded = ShardedStages(modules, groups, synchronize, whole)
        copies = ReplicatedParameters(modules, shared, schedule, groups, sharded.gathered_shardings)
        parameters_of = {stage: [*module.parameters()] for stage, module in modules.items()}
        self.buckets = GradientBuckets(copies.reduced, parameters_of, groups, synchronize)
        # Each shard's gradient is the mean over the shares of the batch already.
        self._tied_shards = GradientBuckets(copies.tied_shards, {}, groups, synchronize, shares=1)
        self._tied = copies if shared else None
        has_shards, has_replicas = bool(sharded.parameters), groups.layout.shares > 1
        self.trained = TrainedParameters(modules, copies.is_counted)
        self.checks = [
            *([copies.check_hooks] if shared or has_shards else []),
            *([sharded.check_reduction, sharded.free_all] if has_shards else []),
            self.trained.check_parameters,
        ]
        self.post_step = [
            *([synchronize] if device.type == "cuda" else []),
            *([sharded.free_all] if has_shards else []),
            *([copies.broadcast_buffers] if has_replicas else []),
        ]
        self._reductions: list[Callable[[], Sequence[Wait]]] = [
            *([self.buckets.start] if copies.reduced else []),
            *([lambda: [sharded.start()]] if has_shards else []),
            *([lambda: [self._sum_tied_shards]] if copies.tied_shards else []),
        ]
        self._has_dtensors = any(map(is_dtensor, self.trained.parameters))
        self.reduces = bool(self._reductions) or self._has_dtensors

    def arrange_buckets(self, stages: Mapping[int, Stage], schedule: Schedule) -> None:
        """Order gradients in their buffers by the order in which a step completes them; collective
        over all ranks.

        Args:
            stages: this rank's stages with graphs.
            schedule: the schedule of the step.
        """
        names = {
            index: stage.functions.backward_graphs.completion_order
            for index, stage in stages.items()
        }
        for part in reversed(self._groups.everybody.gather(names)):  # the first rank decides
            names |= {index: part[index] for index in names.keys() & part.keys()}
        order = [
            stages[index].module.get_parameter(name)
            for index in self._last_weights(schedule)
            for name in names.get(index, ())
        ]
        sum_dtype = next((stage.grad_dtype for stage in stages.values()), None)
        self.buckets.arrange({id(p): at for at, p in enumerate(order)}, sum_dtype)

    def report_gradients(self, stages: Mapping[int, Stage], schedule: Schedule) -> None:
        """Make the last W of each stage start the reductions of the buckets that it completes.

        Args:
            stages: this rank's stages with graphs.
            schedule: the schedule of the step.
        """
        for index, microbatch in self._last_weights(schedule).items():
            if index in stages:
                report = self.buckets.report_for(index, stages[index].module)
                stages[index].report_completion(microbatch, report)

    def collectives(self) -> dict[int, StageCollectives]:
        """Measure the collectives over parameters and gradients of this rank's stages; collective
        over all ranks.
        """
        return self.buckets.measure_reductions() | self.sharded.measure_gathers()

    def _last_weights(self, schedule: Schedule) -> dict[int, int]:
        """Map each stage to the microbatch of its last W (or B) in a step. Stages are in the order
        of their last Ws.
        """
        row = schedule.ranks[self._groups.rank]
        backwards = [action for action in row if action.kind in BACKWARDS]
        last = {action.stage: action for action in backwards}
        return {a.stage: a.microbatch for a in backwards if a is last[a.stage]}

    def build_optimizer(self, optimizer_fn: OptimizerFunction) -> None:
        """Build the optimizer, if the rank has parameters to train; collective if parameters are
        tied.

        Raises:
            PipelineError: as ``TrainedParameters.build_optimizer``, or the optimizer has other
                options for a tied parameter than another rank's.
        """
        self.trained.build_optimizer(optimizer_fn, self._names)
        if self._tied is not None:
            self._tied.check_optimizers(self.trained.optimizer)

    def _names(self) -> Mapping[int, str]:
        """Map the ``id`` of a parameter to its name in the whole model. In a list of stages it
        begins with the stage's index, as in an ``nn.Sequential`` of the stages.

        A tied parameter has one name on all ranks, the first of its names in the whole model. So
        groups that are made by names have it in the same group everywhere.
        """
        named = [
            (self._model_name(stage, name), parameter)
            for stage, module in self.modules.items()
            for name, parameter in module.named_parameters()
        ]
        return {id(parameter): name for name, parameter in reversed(named)}

    def _model_name(self, stage: int, name: str) -> str:
        """Return the first name in the whole model of a stage's parameter."""
        if self._has_model_names:
            first_names: Mapping[str, str] = getattr(self.modules[stage], "first_names", {})
            return first_names.get(name, name)
        stage, name = self._first_holders.get((stage, name), (stage, name))
        return f"{stage}.{name}"

    def restore_process_groups(self) -> None:
        """Restore the process groups that sharded modules had before the trainer."""
        self.sharded.restore_process_groups()

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Context that sets gradients of earlier steps aside, so that others can be computed. At
        its end, it restores the earlier gradients and all buffers.
        """
        gradients = [(parameter, parameter.grad) for parameter in self.trained.parameters]
        buffers = [buffer for module in self.modules.values() for buffer in module.buffers()]
        values = [buffer.clone() for buffer in buffers]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for buffer, value in zip(buffers, values, strict=True):
                buffer.detach().copy_(value)

    @contextlib.contextmanager
    def reducing_gradients(self, scale: float = 1.0) -> Iterator[None]:
        """Context that reduces, at its end, the gradients that are computed inside.

        Afterwards each copy of a tied parameter has the sum of the gradients of all copies, and
        each replica of the pipeline has the mean over replicas. All are divided by the scale.
        Gradients of earlier steps are added once, after the reduction, so that steps can
        accumulate. After an error, only gradients of earlier steps remain.

        The reduction of a bucket starts in the last W that adds to it. Other reductions start after
        the rank's last action.

        Args:
            scale: the scale of the losses.

        Raises:
            LostPeerError: another rank did not take part.
        """
        earlier_gradients = [(parameter, parameter.grad) for parameter in self.trained.parameters]
        for parameter, _ in earlier_gradients:
            parameter.grad = None
        self.buckets.begin()
        try:
            self.sharded.gather_first()
            yield
            for wait in [wait for start in self._reductions for wait in start()]:
                wait()
        except BaseException:
            for parameter, earlier in earlier_gradients:
                parameter.grad = earlier
            self.sharded.forget()
            self.buckets.release()
            raise
        if self._has_dtensors:
            for parameter, _ in earlier_gradients:
                redistribute_gradient(parameter)
        if scale != 1.0:
            gradients = (parameter.grad for parameter, _ in earlier_gradients)
            scale_together([local_tensor(g) for g in gradients if g is not None], 1.0 / scale)
        for parameter, earlier in earlier_gradients:
            if earlier is not None:
                parameter.grad = self._add_earlier(parameter, earlier)

    def _sum_tied_shards(self) -> None:
        """Sum the reduced gradients of sharded parameters over the stages that have them."""
        self._tied_shards.begin()
        for wait in self._tied_shards.start():
            wait()

    @torch.no_grad()
    def _add_earlier(self, parameter: nn.Parameter, earlier: Tensor) -> Tensor:
        """Return the sum of a step's gradient and the gradient of earlier steps. The earlier tensor
        is not changed.
        """
        new = parameter.grad
        if new is None:
            return earlier
        return new.add_(earlier) if self.buckets.has_place(parameter) else earlier + new


def _check_tied(index: int, module: nn.Module, shared: Sequence[Sequence[Holder]]) -> None:
    """Check that parameters which a stage's modules tie to other stages are in ``shared``.

    Raises:
        PipelineError: names a parameter that is missing in ``shared``.
    """
    named = {holder for group in shared for holder in group}
    for name in getattr(module, "tied_elsewhere", ()):
        if (index, name) not in named:
            raise PipelineError(
                f"{name!r} of stage {index} is tied to a parameter of another stage, and "
                "shared_parameters does not have it: build the trainer by plan.trainer(...), or "
                "pass StageOptions(shared_parameters=plan.shared)"
            )
