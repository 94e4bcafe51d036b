"""Build this rank's stages from its modules, for each new shape of a batch."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from autosplit.capture.size_rule import Leaf
from autosplit.device import generators_kept
from autosplit.errors import BatchError, CaptureError, PipelineError, PlanError
from autosplit.pipeline.engine.autocast import WithAutocast
from autosplit.pipeline.engine.boundaries import Boundaries, Boundary, TensorMeta
from autosplit.pipeline.engine.evaluation import ModuleStage
from autosplit.pipeline.engine.stage_builder import (
    MicrobatchExample,
    build_stages,
    check_loss,
    compile_stages,
)
from autosplit.pipeline.engine.stage_factory import SplitStage, traced
from autosplit.pipeline.engine.stage_protocols import StageFactory, TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds, draw_number
from autosplit.pipeline.engine.stage_set import MicrobatchSizes, StageSet
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.fault_store import describe_error
from autosplit.ranks.groups import Groups
from autosplit.runtime.call_cache import CallCache
from autosplit.runtime.functions import SplitFunctions
from autosplit.stage import Stage
from autosplit.trainer.aux_losses import WithAuxLosses, check_holders
from autosplit.trainer.batches import Batch, Microbatches, MicrobatchList
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
from autosplit.trainer.step_plans import Kind, StepPlan
from autosplit.trainer.trainer_options import TrainerOptions


class RankStages:
    """This rank's stages: in training with graphs, in evaluation the modules themselves.

    A stage's module is completed first::

        module -> with the loss, in the last stage -> with auxiliary losses, if any
               -> under autocast -> captured as a stage

    Args:
        stages: the source of all stages of the model.
        loss_fn: the loss, which runs at the end of the last stage.
        schedule: the schedule, whose placement says which rank has which stage.
        options: the trainer's options.
        factory: makes a stage from a module.
        model: this rank's modules and parameters.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        seeds: the seeds of stages that draw random numbers.
        device: the device of the stages.

    Attributes:
        observer: a function that an evaluation calls with the arguments of the loss, on the rank
            that computes the loss; None: nothing is called.
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
        # Autocast around stages changes the dtypes of their outputs.
        self._predicted = stages.boundaries
        self._completed: dict[tuple[bool, int | None], dict[int, nn.Module]] = {}
        self._reusable_stages: dict[nn.Module, Any] = {}
        self._arranged = False
        self._has_checked_aux = False
        self._captured_sizes: dict[bool, set[tuple[Leaf, ...]]] = {False: set(), True: set()}
        self._sets: dict[Hashable, StageSet] = {}
        self._evaluation_stages: dict[tuple[Kind, bool], dict[int, ModuleStage]] = {}
        self._evaluation_boundaries = CallCache[tuple[Kind, MicrobatchSizes], Boundaries]()
        self._evaluated: dict[Kind, tuple[torch.dtype, tuple[str, ...]]] = {}
        self.observer: Observer | None = None

    def has_graphs(self, plan: StepPlan) -> bool:
        """Whether this rank knows, without a message, that all stages have graphs for a plan's
        microbatches. The result is the same on all ranks of the pipeline.
        """
        if self._is_cut:
            captured = self._captured_sizes[plan.evaluates]
            if not captured.issuperset(sizes.inputs for sizes in plan.microbatches):
                return False
        if plan.evaluates:
            return plan.kind in self._evaluated
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
        self._take_sizes(plan)
        key, modules = _set_key(plan), self.complete(batch)
        plan.aux = self._with_aux_losses(modules)
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

    def for_evaluation(
        self, plan: StepPlan, batch: Batch | MicrobatchList | None
    ) -> dict[int, ModuleStage]:
        """Return the stages of an evaluation, which call the modules themselves.

        Args:
            plan: the plan, in which the boundaries and the stages with auxiliary losses are set.
            batch: this rank's batch; None on a rank whose stages use none of it.

        Raises:
            BatchError: a stage of a cut model cannot take a microbatch.
        """
        self._take_sizes(plan)
        plan.is_built = True
        key, modules = plan.kind, self.complete(batch, evaluates=True)
        plan.aux = self._with_aux_losses(modules)
        plan.boundaries = [
            self._evaluation_boundaries.get((key, sizes))
            or self._evaluation_boundaries.remember((key, sizes), Boundaries())
            for sizes in plan.microbatches
        ]
        stages = self._evaluation_stages.get((key, plan.listed))
        if stages is None:
            gathering = self._model.sharded.gathered_without_hooks
            communicates = self._shares_tensors or bool(self._model.sharded.indices)
            stages = self._evaluation_stages[key, plan.listed] = {
                index: ModuleStage(
                    module,
                    index,
                    self._dataflow.shared_places(index),
                    partial(gathering, index),
                    refuses=plan.listed and not communicates,
                )
                for index, module in modules.items()
            }
        return stages

    def _take_sizes(self, plan: StepPlan) -> None:
        """Capture the stages of a cut model for microbatches of new sizes; collective unless
        ``plan.is_built``.

        Raises:
            BatchError: on all ranks: the model cannot be captured, or cut, for these sizes.
        """
        if not self._is_cut or plan.is_built:
            return
        rows, refusal = dict.fromkeys(sizes.inputs for sizes in plan.microbatches), ""
        with self._groups.activity.during("capturing the model for other sizes", announced=True):
            for module in self._model.modules.values():
                training = module.training and not plan.evaluates
                take_sizes: Any = getattr(module, "take_sizes", None)  # other modules take any
                try:
                    if take_sizes is not None:
                        take_sizes([*rows], training=training)
                except (CaptureError, PlanError) as error:
                    refusal = refusal or str(error)
        refusals = self._groups.everybody.gather(refusal)
        if any(refusals):
            raise BatchError(next(filter(None, refusals)))
        self._captured_sizes[plan.evaluates].update(rows)

    def refuse_misfits(self, plan: StepPlan) -> None:
        """Raise on all ranks if a stage could not take a microbatch of an evaluation; collective.
        The next evaluation may follow.

        Raises:
            BatchError: names the first such microbatch, and the stage.
        """
        errors = {
            (number, index): error
            for index, stage in self._evaluation_stages[plan.kind, plan.listed].items()
            for number, error in stage.refused.items()
        }
        if self._groups.everybody.all_reduce_and(0 if errors else -1) == [-1]:
            return
        texts = {place: describe_error(error) for place, error in errors.items()}
        of_ranks: list[dict[tuple[int, int], str]] = self._groups.everybody.gather(texts)
        for stage in self._evaluation_stages[plan.kind, plan.listed].values():
            stage.refused.clear()
        # The boundaries have shapes of stand-ins.
        for sizes in plan.microbatches:
            self._evaluation_boundaries.remember((plan.kind, sizes), Boundaries())
        plan.executor = None
        place, text = min(pair for of_rank in of_ranks for pair in of_rank.items())
        raise BatchError(
            f"microbatch {place[0]} does not fit stage {place[1]}: {text}"
        ) from errors.get(place)

    def set_loss_of_evaluation(self, plan: StepPlan, losses: Mapping[int, list[Tensor]]) -> None:
        """Set the dtype and the part names of an evaluation's losses; collective in the first
        evaluation of microbatches of this kind.

        Raises:
            PipelineError: the loss is not one scalar, or a part has another metric's name.
        """
        if plan.kind not in self._evaluated:
            stages = self._evaluation_stages[plan.kind, plan.listed]
            names = stages[self._last].part_names or () if losses else ()
            for outputs in losses.values():
                check_loss([TensorMeta(t.shape, t.dtype, True) for t in outputs], names)
            check_part_names([*(plan.aux[0].weights if plan.aux else ()), *names])
            loss_dtype = next((loss.dtype for loss, *_ in losses.values()), None)
            rows = self._groups.everybody.gather((loss_dtype, names, self._seeds.drew))
            self._evaluated[plan.kind] = next(row[:2] for row in rows if row[0])
            if any(drew for *_, drew in rows) and self._seeds.expect_draws():
                draw_number()
        plan.dtype, part_names = self._evaluated[plan.kind]
        for boundaries in plan.boundaries:
            boundaries.part_names = part_names

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
                    f"stage {index} writes into its buffer {shared[id(buffer)]!r}, of which "
                    "a stage of another rank has a copy, and the two copies would differ: give "
                    "each stage its own module, or place both stages on one rank"
                )

    def complete(
        self, batch: Batch | MicrobatchList | None, *, evaluates: bool = False
    ) -> Mapping[int, nn.Module]:
        """Return this rank's modules by stage, with autocast and auxiliary losses. The last stage's
        module also computes the loss.

        The batch decides whether the loss gets one target or a tuple of targets, and their number.
        """
        if isinstance(batch, MicrobatchList):
            batch = next(iter(batch.batches or ()), None)
        targets = None if batch is None else batch[1]
        count = len(targets) if isinstance(targets, tuple | list) else None
        if targets is None:
            count = 0
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
        """Return this rank's stages with auxiliary losses, without the wrapper of autocast; the
        first call is collective.

        Raises:
            PipelineError: no module of any stage has one of the losses.
        """
        if not self._aux_losses:
            return []
        inner = [m.module if isinstance(m, WithAutocast) else m for m in modules.values()]
        stages = [module for module in inner if isinstance(module, WithAuxLosses)]
        if not self._has_checked_aux:
            check_holders(stages, self._aux_losses, self._groups.everybody)
            self._has_checked_aux = True
        return stages

    def _observe(self, output: Any, targets: Any) -> None:
        """Pass the arguments of the loss to the observer, if there is one."""
        if self.observer is not None:
            self.observer(output, targets)


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
