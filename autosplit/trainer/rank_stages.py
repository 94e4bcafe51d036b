"""Build this rank's stages from its modules, for each new shape of a batch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from autosplit.device import generators_kept
from autosplit.errors import CaptureError, PipelineError
from autosplit.pipeline.engine.autocast import WithAutocast
from autosplit.pipeline.engine.evaluation import ModuleStage
from autosplit.pipeline.engine.stage_builder import build_stages, compile_stages, traced
from autosplit.pipeline.engine.stage_protocols import StageFactory, TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import Groups
from autosplit.stage import Stage
from autosplit.trainer.aux_losses import WithAuxLosses, check_holders
from autosplit.trainer.batches import Batch, Microbatches
from autosplit.trainer.options import TrainerOptions
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.stage_modules import (
    LossFunction,
    Observer,
    StageSource,
    WithLoss,
    check_trained,
    explain_failed_capture,
)
from autosplit.trainer.step_metrics import check_part_names
from autosplit.trainer.step_plans import StepPlan


class RankStages:
    """This rank's stages: in training with graphs, in evaluation the modules themselves.

    A stage's module is completed first::

        module -> with the loss, in the last stage -> with auxiliary losses, if any
               -> under autocast -> captured as a stage

    Args:
        stages: the source of all stages of the model.
        loss_fn: the loss, which runs at the end of the last stage.
        schedule: its placement says which rank has which stage.
        options: the trainer's options.
        factory: makes a stage from a module.
        model: this rank's modules and parameters.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        seeds: the seeds of stages that draw random numbers.
        device: the device of the stages.

    Attributes:
        observer: a function that is called with the arguments of the loss in evaluation, on the
            rank that computes the loss; None if there is none.
    """

    def __init__(
        self,
        stages: StageSource,
        loss_fn: LossFunction,
        schedule: Schedule,
        options: TrainerOptions,
        factory: StageFactory,
        model: RankModel,
        groups: Groups,
        dataflow: StageDataflow,
        seeds: StageSeeds,
        device: torch.device,
    ) -> None:
        self._loss_fn, self._autocast = loss_fn, options.stages.autocast
        self._aux_losses = options.stages.aux_losses
        self._model, self._groups, self._dataflow = model, groups, dataflow
        self._seeds, self._device = seeds, device
        # Buffers of modules that stages on different ranks share.
        self._shared_buffers = [
            holder
            for holders in stages.shared_buffers
            if len({schedule.placement[stage] for stage, _ in holders}) > 1
            for holder in holders
        ]
        self._factory = factory
        self._shares_tensors = groups.layout.tensor_ranks > 1
        self._last, self._is_cut = schedule.stages - 1, stages.wiring is not None
        self._completed: dict[tuple[bool, int | None], dict[int, nn.Module]] = {}
        self._reusable_stages: dict[nn.Module, Any] = {}
        self._arranged = False
        self.observer: Observer | None = None

    def build_stages(
        self,
        plan: StepPlan,
        schedule: Schedule,
        batch: Batch | None,
        inputs: Microbatches,
        targets: Microbatches,
    ) -> None:
        """Build and compile the stages of a training step from its first batch; collective.

        Args:
            plan: the step plan; the stages and their graphs, their boundaries and the dtype of the
                losses are set in it.
            schedule: the schedule of training.
            batch: this rank's batch; None on a rank whose stages use none of it.
            inputs: the batch's inputs, by microbatch.
            targets: the batch's targets, by microbatch.
        """
        activity, modules = self._groups.activity, self.complete(batch)
        plan.aux = self._with_aux_losses(modules)
        with activity.during("building its stages", announced=True):
            plan.stages, plan.boundaries = build_stages(
                modules,
                schedule.stages,
                self._dataflow,
                self._groups,
                self._stage_for,
                inputs=_examples(plan, "inputs", inputs),
                targets=_examples(plan, "targets", targets),
                device=self._device,
            )
        check_part_names([*self._aux_losses, *plan.boundaries.part_names])
        if self._groups.layout.shares > 1 and not self._arranged:
            # Only once: reports of stages of other shapes name these buckets.
            self._model.arrange_buckets(traced(plan.stages), schedule)
            self._arranged = True
        self._model.report_gradients(traced(plan.stages), schedule)
        with activity.during("compiling its stages", announced=True):
            compile_stages(plan.stages, schedule)
        graphs = traced(plan.stages)
        if len(graphs) == len(plan.stages):
            plan.functions = [stage.functions for stage in graphs.values()]
        plan.dtype = plan.boundaries.outputs[self._last][0].dtype
        stages = plan.stages.values()
        draws = any(not isinstance(s, Stage) or s.functions.draws for s in stages)
        # This also starts the step's clock on all ranks together, replicas included.
        if self._groups.everybody.all_reduce_and(0 if draws else -1) == [0]:
            self._seeds.expect_draws()

    def for_evaluation(self, plan: StepPlan, batch: Batch | None) -> dict[int, ModuleStage]:
        """Return the stages of an evaluation, which call the modules themselves.

        Args:
            plan: the step plan; the stages with auxiliary losses are set in it.
            batch: this rank's batch; None on a rank whose stages use none of it.
        """
        modules = self.complete(batch, evaluates=True)
        plan.aux = self._with_aux_losses(modules)
        # A stage of a whole model calls no module inside, whose hooks would gather its parameters.
        gathered = partial(self._model.sharded.gathered, frees_all=False)
        return {
            index: ModuleStage(
                module,
                index,
                self._dataflow.shared_places(index),
                **({"gathering": partial(gathered, index)} if self._is_cut else {}),
            )
            for index, module in modules.items()
        }

    def _stage_for(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """Return a stage that runs ``module(*args)``.

        The module's earlier stage is used again if it accepts the arguments, because its graphs may
        be valid for these sizes.
        """
        stage = self._reusable_stages.get(module)
        with self._model.sharded.gathered(index):
            if stage is not None and stage.accepts(args):
                stage.prepare(args)
                return cast(TrainableStage, stage)
            try:
                with generators_kept():
                    new_stage = self._factory(module, args, index=index)
            except CaptureError:
                # The module is not called to explain the error if it has collectives: the ranks
                # that share its tensors would have to call it, too.
                explain_failed_capture(index, module, args, called=not self._shares_tensors)
                raise
        if isinstance(new_stage, Stage):
            self._check_buffers(index, module, new_stage.functions.updated_state)
            new_stage.seed = partial(self._seeds.seed, index)
            self._model.sharded.connect(new_stage.sharding)
            if self._model.buckets.buckets:
                new_stage.place_gradients(self._model.buckets.memory_for)
        else:
            self._check_buffers(index, module, getattr(new_stage, "written_buffers", ()))
        if hasattr(new_stage, "accepts"):
            self._reusable_stages[module] = new_stage
        return new_stage

    def _check_buffers(self, index: int, module: nn.Module, written: Container[str]) -> None:
        """Refuse a forward that writes into a buffer of which another rank has a copy.

        The copies would become different, because each rank writes only its own copy.

        Args:
            index: the index of the stage.
            module: the stage's module, as ``complete`` returns it.
            written: names of the buffers that the forward writes.

        Raises:
            PipelineError: names the buffer.
        """
        bare = self._model.modules[index]
        shared = {
            id(bare.get_buffer(name)): name for at, name in self._shared_buffers if at == index
        }
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if id(buffer) in shared and name in written:
                raise PipelineError(
                    f"stage {index} writes into its buffer {shared[id(buffer)]!r}, which belongs "
                    "to a module that a stage of another rank has, too, and the two would differ: "
                    "give each stage its own module, or place both stages on one rank"
                )

    def complete(self, batch: Batch | None, *, evaluates: bool = False) -> Mapping[int, nn.Module]:
        """Return this rank's modules by stage, with autocast and auxiliary losses; the last stage's
        module computes the loss.

        The batch tells whether the loss gets one target or a tuple of targets, and how many.
        """
        targets = None if batch is None else batch[1]
        count = None if isinstance(targets, Tensor) else len(targets or ())
        key = evaluates, count
        if key not in self._completed:
            modules, last = dict(self._model.modules), self._last
            if last in modules:
                check_trained(self._loss_fn, modules[last])
                observer = self._observe if evaluates else None
                modules[last] = WithLoss(modules[last], self._loss_fn, count, observer)
            if self._aux_losses:
                modules = {
                    stage: WithAuxLosses(module, self._aux_losses, self._device)
                    for stage, module in modules.items()
                }
            dtype = self._autocast
            if dtype is not None:
                modules = {
                    stage: WithAutocast(module, self._device, dtype)
                    for stage, module in modules.items()
                }
            self._completed[key] = modules
        return self._completed[key]

    def _with_aux_losses(self, modules: Mapping[int, nn.Module]) -> list[WithAuxLosses]:
        """Return the stages with auxiliary losses, without autocast; collective if there are any.

        Raises:
            PipelineError: no module of any stage has one of the losses.
        """
        if not self._aux_losses:
            return []
        inner = [m.module if isinstance(m, WithAutocast) else m for m in modules.values()]
        stages = [module for module in inner if isinstance(module, WithAuxLosses)]
        check_holders(stages, self._aux_losses, self._groups.everybody)
        return stages

    def _observe(self, output: Any, targets: Any) -> None:
        """Pass the arguments of the loss to the observer, if there is one."""
        if self.observer is not None:
            self.observer(output, targets)


def _examples(plan: StepPlan, name: str, part: Microbatches) -> list[Any]:
    """Return the tensors of a part's first microbatch, with ``requires_grad`` as in the plan."""
    return [
        None
        if tensor is None
        else tensor.detach().requires_grad_((name, number) in plan.grad_slots)
        for number, tensor in enumerate(part[0] if part else ())
    ]
