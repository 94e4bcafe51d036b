"""This rank's stages in evaluation: the modules themselves, without graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from autosplit.errors import BatchError
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.engine.evaluation import ModuleStage
from autosplit.pipeline.engine.stage_builder import check_loss
from autosplit.pipeline.engine.stage_seeds import StageSeeds, draw_number
from autosplit.pipeline.engine.stage_set import MicrobatchSizes
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.ranks.fault_store import describe_error
from autosplit.ranks.groups import Groups
from autosplit.runtime.call_cache import CallCache
from autosplit.trainer.batches import Batch, MicrobatchList
from autosplit.trainer.completed_modules import CompletedModules
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.step_metrics import check_part_names
from autosplit.trainer.step_plans import Kind, StepPlan


class EvaluationStages:
    """This rank's stages in evaluation.

    Args:
        completed: the modules of the stages, with the loss.
        last: the last stage.
        model: this rank's modules and parameters.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        seeds: the seeds of stages that draw random numbers.
    """

    def __init__(
        self,
        completed: CompletedModules,
        last: int,
        model: RankModel,
        groups: Groups,
        dataflow: StageDataflow,
        seeds: StageSeeds,
    ) -> None:
        self._completed, self._last, self._model = completed, last, model
        self._groups, self._dataflow, self._seeds = groups, dataflow, seeds
        communicates = groups.layout.tensor_ranks > 1 or bool(model.sharded.indices)
        self._can_refuse = not communicates
        self._stages: dict[tuple[Kind, bool], dict[int, ModuleStage]] = {}
        self._boundaries = CallCache[tuple[Kind, MicrobatchSizes], Boundaries]()
        self._evaluated: dict[Kind, tuple[torch.dtype, tuple[str, ...]]] = {}

    def is_known(self, plan: StepPlan) -> bool:
        """Whether microbatches of this kind were evaluated before, and the modules can take them
        without a capture. The result is the same on all ranks of the pipeline.
        """
        return plan.kind in self._evaluated and self._completed.has_sizes(plan)

    def of_plan(
        self, plan: StepPlan, batch: Batch | MicrobatchList | None
    ) -> dict[int, ModuleStage]:
        """Return the stages of an evaluation, which call the modules themselves.

        Args:
            plan: the plan, in which the boundaries and the stages with auxiliary losses are set.
            batch: this rank's batch; None on a rank whose stages use none of it.

        Raises:
            BatchError: a stage of a cut model cannot take a microbatch.
        """
        self._completed.take_sizes(plan)
        plan.is_built = True
        key, modules = plan.kind, self._completed.complete(batch, evaluates=True)
        plan.aux = self._completed.with_aux_losses(modules)
        plan.boundaries = [
            self._boundaries.get((key, sizes))
            or self._boundaries.remember((key, sizes), Boundaries())
            for sizes in plan.microbatches
        ]
        stages = self._stages.get((key, plan.listed))
        if stages is None:
            gathering = self._model.sharded.gathered_without_hooks
            stages = self._stages[key, plan.listed] = {
                index: ModuleStage(
                    module,
                    index,
                    self._dataflow.shared_places(index),
                    partial(gathering, index),
                    refuses=plan.listed and self._can_refuse,
                )
                for index, module in modules.items()
            }
        return stages

    def refuse_misfits(self, plan: StepPlan) -> None:
        """Raise on all ranks if a stage could not take a microbatch of an evaluation; collective.
        The next evaluation may follow.

        Raises:
            BatchError: names the first such microbatch, and the stage.
        """
        errors = {
            (number, index): error
            for index, stage in self._stages[plan.kind, plan.listed].items()
            for number, error in stage.refused.items()
        }
        if self._groups.everybody.all_reduce_and(0 if errors else -1) == [-1]:
            return
        texts = {place: describe_error(error) for place, error in errors.items()}
        of_ranks: list[dict[tuple[int, int], str]] = self._groups.everybody.gather(texts)
        for stage in self._stages[plan.kind, plan.listed].values():
            stage.refused.clear()
        # The boundaries have shapes of stand-ins.
        for sizes in plan.microbatches:
            self._boundaries.remember((plan.kind, sizes), Boundaries())
        plan.executor = None
        place, text = min(pair for of_rank in of_ranks for pair in of_rank.items())
        raise BatchError(
            f"microbatch {place[0]} does not fit stage {place[1]}: {text}"
        ) from errors.get(place)

    def set_loss(self, plan: StepPlan, losses: Mapping[int, list[Tensor]]) -> None:
        """Set the dtype and the part names of an evaluation's losses; collective in the first
        evaluation of microbatches of this kind.

        Raises:
            PipelineError: the loss is not one scalar, or a part has another metric's name.
        """
        if plan.kind not in self._evaluated:
            stages = self._stages[plan.kind, plan.listed]
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
