"""Build this rank's training stages from its modules, for each new shape of a batch."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from autosplit.device import generators_kept
from autosplit.errors import BatchError, CaptureError, PipelineError
from autosplit.pipeline.engine.boundaries import Boundary
from autosplit.pipeline.engine.stage_builder import (
    MicrobatchExample,
    build_stages,
    compile_stages,
)
from autosplit.pipeline.engine.stage_factory import SplitStage, traced
from autosplit.pipeline.engine.stage_protocols import StageFactory, TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.stage_set import StageSet
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import Groups
from autosplit.runtime.functions import SplitFunctions
from autosplit.stage import Stage
from autosplit.trainer.batches import Batch, Microbatches, MicrobatchList
from autosplit.trainer.completed_modules import CompletedModules
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.stage_modules import (
    StageSource,
    explain_failed_capture,
)
from autosplit.trainer.step_metrics import check_part_names
from autosplit.trainer.step_plans import StepPlan
from autosplit.trainer.trainer_options import TrainerOptions


class RankStages:
    """This rank's stages in training, with graphs.

    Args:
        stages: the source of all stages of the model.
        completed: the modules of the stages, with the loss.
        schedule: the schedule, whose placement says which rank has which stage.
        options: the trainer's options.
        factory: makes a stage from a module.
        model: this rank's modules and parameters.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        seeds: the seeds of stages that draw random numbers.
        device: the device of the stages.
    """

    def __init__(
        self,
        stages: StageSource,
        completed: CompletedModules,
        schedule: Schedule,
        options: TrainerOptions,
        factory: StageFactory,
        model: RankModel,
        groups: Groups,
        dataflow: StageDataflow,
        seeds: StageSeeds,
        device: torch.device,
    ) -> None:
        self._autocast = options.stages.autocast
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
        self._last, self._completed = schedule.stages - 1, completed
        # Autocast around stages changes the dtypes of their outputs.
        self._predicted = stages.boundaries
        self._reusable_stages: dict[nn.Module, Any] = {}
        self._arranged = False
        self._sets: dict[Hashable, StageSet] = {}

    def has_graphs(self, plan: StepPlan) -> bool:
        """Whether this rank knows, without a message, that all stages have graphs for a training
        plan's microbatches. The result is the same on all ranks of the pipeline.
        """
        if not self._completed.has_sizes(plan):
            return False
        built = self._sets.get(_set_key(plan))
        if built is None or not built.has_rules:
            return False
        return all(built.boundaries_of(sizes) is not None for sizes in plan.microbatches)

    def build_stages(
        self,
        plan: StepPlan,
        schedule: Schedule,
        batch: Batch | MicrobatchList | None,
        inputs: Microbatches,
        targets: Microbatches,
    ) -> None:
        """Set the stages of a plan for training; build and compile missing stages from the batch.
        Collective unless ``plan.is_built``.

        Args:
            plan: the plan, in which the stages, the boundaries between them and the dtype of the
                losses are set.
            schedule: the schedule of the step.
            batch: this rank's batch; None on a rank whose stages use none of it.
            inputs: the inputs of the batch, by microbatch.
            targets: the targets of the batch, by microbatch.

        Raises:
            BatchError: a stage cannot take a microbatch; names it.
        """
        self._completed.take_sizes(plan)
        key, modules = _set_key(plan), self._completed.complete(batch)
        plan.aux = self._completed.with_aux_losses(modules)
        built = self._sets.get(key)
        if built is not None and not (built.has_rules or built.first_sizes == plan.microbatches[0]):
            built = None  # a user's own stage factory is called for each size
        is_new = built is None
        if built is None:
            built = StageSet(schedule.stages, self._dataflow)
        if not plan.is_built:
            self._build_missing(built, plan, modules, inputs, targets)
        self._sets[key] = built
        plan.stages, boundaries = built.stages, built.boundaries
        plan.boundaries = [built.boundaries_of(sizes) or boundaries for sizes in plan.microbatches]
        plan.dtype = boundaries.outputs[self._last][0].dtype
        if is_new:
            self._arrange_buckets(plan, schedule)
        if not plan.is_built:
            self._model.report_gradients(traced(plan.stages), schedule)
            with self._groups.activity.during("compiling its stages", announced=True):
                compile_stages(plan.stages, schedule)
            self._start_together(plan)  # also if only replicas have new stages
        plan.is_built = True

    def _build_missing(
        self,
        built: StageSet,
        plan: StepPlan,
        modules: Mapping[int, nn.Module],
        inputs: Microbatches,
        targets: Microbatches,
    ) -> None:
        """Build the stages for microbatches that their graphs do not fit; collective.

        Raises:
            BatchError: on all ranks of all pipelines: a stage cannot take a microbatch.
        """
        refusal, is_new = "", not built.boundaries.outputs
        rows = {
            sizes: _example(plan, inputs, targets, number)
            for number, sizes in enumerate(plan.microbatches)
            if is_new or built.boundaries_of(sizes) is None
        }
        largest_first = sorted(rows.values(), key=lambda row: -row.sizes.elements)
        # Ranks gather parameters together, whether or not a rank builds a stage again.
        gathered = self._model.sharded.all_gathered() if is_new else nullcontext()
        try:
            if largest_first:
                with self._groups.activity.during("building its stages", announced=True), gathered:
                    build_stages(
                        built,
                        modules,
                        self._groups,
                        self._stage_for,
                        largest_first,
                        refuses=plan.listed or not is_new,
                        device=self._device,
                        expected=self._expected(largest_first) if is_new else (),
                    )
        except BatchError as error:
            refusal = str(error)
        if len(self._groups.layout.pipelines) > 1:
            refusals = self._groups.everybody.gather(refusal)
            refusal = refusal or next(filter(None, refusals), "")
        if refusal:
            raise BatchError(refusal)

    def functions_of_largest(
        self, plan: StepPlan, inputs: Microbatches, targets: Microbatches
    ) -> list[dict[int, SplitFunctions]]:
        """For each of the largest microbatches of a plan with stages, by stage of this rank, the
        stage's functions at its sizes; empty if a stage has no graphs. For a plan's first call,
        collective if parameters are sharded.
        """
        if plan.largest_functions:
            return plan.largest_functions
        stages, built = traced(plan.stages), self._sets[_set_key(plan)]
        if len(stages) < len(plan.stages):
            return []
        functions: list[dict[int, SplitFunctions]] = [{} for _ in plan.largest]
        with self._model.sharded.all_gathered():
            for index, stage in stages.items():
                for number, row in zip(plan.largest, functions, strict=True):
                    example = _example(plan, inputs, targets, number)
                    example.outputs |= plan.boundaries[number].outputs
                    stage.prepare(example.example_arguments(index, built, self._device, blank=True))
                    row[index] = stage.functions
        plan.largest_functions = functions
        return functions

    def _expected(self, rows: Sequence[MicrobatchExample]) -> Sequence[Boundary]:
        """The outputs that new stages will have, if they are known before the stages are built."""
        # Autocast around stages changes the dtypes of their outputs.
        if self._autocast is not None or len(rows) > 1:
            return ()
        return self._predicted(rows[0].sizes.inputs)

    def _arrange_buckets(self, plan: StepPlan, schedule: Schedule) -> None:
        """Arrange the buckets of new stages for the replicas' reductions."""
        check_part_names([*self._aux_losses, *plan.boundaries[0].part_names])
        if self._groups.layout.shares > 1 and not self._arranged:
            # Only once: reports of stages of other shapes name these buckets.
            self._model.arrange_buckets(traced(plan.stages), schedule)
            self._arranged = True

    def _start_together(self, plan: StepPlan) -> None:
        """Wait until all ranks have compiled new stages, and agree whether any stage draws random
        numbers; collective.
        """
        stages = plan.stages.values()
        draws = any(not isinstance(s, Stage) or s.functions.draws for s in stages)
        # The step's clock then starts on all ranks together. A rank that was killed while it
        # compiled is noticed here, and named.
        if self._groups.everybody.all_reduce_and(0 if draws else -1) == [0]:
            self._seeds.expect_draws()

    def _stage_for(
        self, module: nn.Module, args: list[Any], varying: Sequence[list[Any]], *, index: int
    ) -> TrainableStage:
        """Return a stage that runs ``module(*args)``.

        The module's earlier stage is used again if it accepts the arguments, because its graphs may
        be valid for these sizes.
        """
        stage = self._reusable_stages.get(module)
        if stage is not None and stage.accepts(args):
            stage.prepare(args, varying) if isinstance(stage, Stage) else stage.prepare(args)
            return cast(TrainableStage, stage)
        options = {"varying": varying} if isinstance(self._factory, SplitStage) else {}
        try:
            with generators_kept():
                new_stage = self._factory(module, args, index=index, **options)
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
            module: the stage's module, as ``CompletedModules`` returns it.
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
                    f"stage {index} writes into its buffer {shared[id(buffer)]!r}, of which "
                    "a stage of another rank has a copy, and the two copies would differ: give "
                    "each stage its own module, or place both stages on one rank"
                )


def _set_key(plan: StepPlan) -> Hashable:
    """The key under which ``RankStages`` keeps the stages for a plan's microbatches."""
    return plan.kind, plan.grad_slots


def _example(
    plan: StepPlan, inputs: Microbatches, targets: Microbatches, number: int
) -> MicrobatchExample:
    """A microbatch of a plan, from which its stages are built."""
    return MicrobatchExample(
        number,
        _examples(plan, "inputs", inputs, number),
        _examples(plan, "targets", targets, number),
        plan.microbatches[number],
    )


def _examples(plan: StepPlan, name: str, part: Microbatches, number: int) -> list[Any]:
    """Return a microbatch's inputs or targets, detached, with ``requires_grad`` as
    ``plan.grad_slots`` says.
    """
    values = part[number] if part else ()
    return [
        value.detach().requires_grad_((name, at) in plan.grad_slots)
        if isinstance(value, Tensor)
        else value
        for at, value in enumerate(values)
    ]
