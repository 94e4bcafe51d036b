"""Step plans: ranks agree on the stages and the executor that run a batch.

Each rank numbers its plans by bits. A plan has the same bit on all ranks:

    batch -> signature -> bits of the plans that may fit -> AND over all ranks
                                                              |            |
                                              a common bit: that plan      none: a new signature
                                                                           |
                                              ranks exchange shapes and dtypes, and all look up
                                              or add the same plan
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError, PlanError
from autosplit.pipeline.engine.boundaries import Boundaries
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.stage_builder import check_inputs
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.ranks.groups import Groups
from autosplit.runtime.functions import SplitFunctions
from autosplit.trainer.aux_losses import WithAuxLosses
from autosplit.trainer.batch_agreement import (
    Metas,
    agree_on_batch,
    check_static,
    compare_contents,
)
from autosplit.trainer.batches import Batch, BatchSlot, BatchSplitter, Microbatches, signature
from autosplit.trainer.loss_gradients import StepWeights
from autosplit.trainer.step_metrics import batch_counts

_MAX_PLANS = 63  # the bits of an int64 that is not negative


@dataclass
class StepPlan:
    """This rank's stages and executor for batches of one shape.

    Attributes:
        metas: shapes and dtypes of the batch's tensors, by path.
        evaluates: whether the step is an evaluation, which only runs forwards.
        weighted: whether the step has weights of its microbatches.
        grad_slots: the tensors of the batch that need a gradient, on any rank.
        boundaries: shapes and dtypes of the tensors between stages.
        dtype: the dtype of the losses; valid after the first batch of this shape.
        stages: this rank's stages, in training; empty until the first batch of this shape.
        functions: the stages' graphs for batches of this shape; empty if a stage has no graph.
        executor: runs the stages; None until the first batch of this shape.
        loss_grads: by microbatch, the gradients of the last stage's outputs, in training.
        aux: this rank's stages with auxiliary losses; empty if there are none.
    """

    metas: Metas
    evaluates: bool
    weighted: bool = False
    grad_slots: frozenset[BatchSlot] = frozenset()
    boundaries: Boundaries = field(default_factory=Boundaries)
    dtype: torch.dtype = torch.float32
    stages: Mapping[int, TrainableStage] = field(default_factory=dict)
    functions: Sequence[SplitFunctions] = ()
    executor: Executor | None = None
    loss_grads: Sequence[list[Tensor | None]] = ()
    aux: Sequence[WithAuxLosses] = ()

    @cached_property
    def counts(self) -> dict[str, int]:
        """The batch's ``"samples"`` and ``"tokens"``, as far as it has them."""
        return batch_counts(self.metas)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one microbatch in this rank's stages."""
        return sum(functions.flops for functions in self.functions)


class StepPlans:
    """The step plans of this rank, numbered as on all other ranks.

    Args:
        splitter: cuts this rank's batches.
        seeds: the seeds of steps; ranks agree on them by the same message.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        modules: this rank's modules by stage.
        source: the rank of the pipeline that decides alone if a step does not wait.
        static: whether all batches must have the shapes of the first batch.
    """

    def __init__(
        self,
        splitter: BatchSplitter,
        seeds: StageSeeds,
        groups: Groups,
        dataflow: StageDataflow,
        modules: Mapping[int, nn.Module],
        *,
        source: int,
        static: bool,
    ) -> None:
        self._splitter, self._seeds, self._groups = splitter, seeds, groups
        self._dataflow, self._modules = dataflow, modules
        self._source, self._static = source, static
        self._plans: dict[int, StepPlan] = {}  # by bit, the least recently used first
        # By signature, the bits of the plans that may run such a batch: other ranks decide between
        # them, as this rank may see only a part of the batch.
        self._plan_bits: dict[Hashable, int] = {}
        self._contents_compared = False

    def of_training(self) -> list[StepPlan]:
        """Return the plans of training steps that have run."""
        return [p for p in self._plans.values() if p.executor is not None and not p.evaluates]

    def agree_on_plan(
        self,
        batch: Batch | None,
        weights: StepWeights | None,
        *,
        evaluates: bool,
        waits: bool = True,
    ) -> tuple[StepPlan, Microbatches, Microbatches]:
        """Return (step plan that all ranks agreed on, inputs by microbatch, targets by microbatch).

        If any rank refuses the batch, nothing has changed. Collective.

        Args:
            batch: this rank's batch.
            weights: the weights of the batch's microbatches; None if there are none.
            evaluates: whether the step is an evaluation.
            waits: whether to wait for the other ranks first.

        Raises:
            BatchError: a rank refuses the batch.
            PipelineError: without ``waits``, this rank has a batch of another shape than the other
                ranks.
        """
        refusal = "" if weights is None else weights.refusal
        key = evaluates, weights is not None, signature(batch)
        fitting = 0 if refusal else self._plan_bits.get(key, 0)
        common, *numbers = self._common_plans(fitting, evaluates=evaluates, waits=waits)
        self._seeds.begin_step(*numbers, evaluates=evaluates)
        if common:
            bit = common & -common
            if not fitting & bit:  # only if the other ranks have not waited
                self._splitter.check_batch(batch)
                raise PipelineError(
                    "this rank has a batch of another shape than the other ranks, which already "
                    "run the step, as step_async() does not wait: pass the same batch on every "
                    "rank"
                )
            inputs, targets = self._splitter.split(batch)
        else:
            bit, inputs, targets = self._agree_on_new_shape(
                batch, refusal, weighted=weights is not None, evaluates=evaluates
            )
            self._plan_bits[key] = self._plan_bits.get(key, 0) | bit
        plan = self._plans[bit] = self._plans.pop(bit)  # now the most recently used
        return plan, inputs, targets

    def _common_plans(self, fitting: int, *, evaluates: bool, waits: bool) -> list[int]:
        """Agree with all ranks on the plans that fit the batch; collective.

        Args:
            fitting: a bit mask of the plans that fit on this rank; 0 if it has not seen the
                signature of its batch.
            evaluates: whether the step is an evaluation.
            waits: whether to wait for all ranks. If False, the mask of the rank whose stage takes
                the first input of the batch is used.

        Returns:
            [bit mask of the plans that fit on all ranks, then the two numbers of
            ``StageSeeds.offer``, reduced over all ranks].
        """
        groups, numbers = self._groups, (fitting, *self._seeds.offer(evaluates=evaluates))
        if waits or len(groups.layout.pipelines) > 1:
            return groups.everybody.all_reduce_and(*numbers)
        return groups.broadcast(numbers, self._source)

    def _agree_on_new_shape(
        self, batch: Batch | None, refusal: str, *, weighted: bool, evaluates: bool
    ) -> tuple[int, Microbatches, Microbatches]:
        """Find or add the plan for a batch whose signature is new to some rank, or which a rank
        refuses; collective.

        Returns:
            (the plan's bit, inputs by microbatch, targets by microbatch).

        Raises:
            BatchError: a rank refuses the batch.
        """
        tensors, grad_slots = dict[str, Tensor](), dict[BatchSlot, Tensor]()
        inputs: Microbatches = []
        targets: Microbatches = []
        try:
            tensors = self._splitter.check_batch(batch)
            if not evaluates:
                grad_slots = self._splitter.requiring_grad(batch)
            inputs, targets = self._splitter.split(batch)
            check_inputs(self._modules, self._dataflow, inputs[0] if inputs else ())
        except (PipelineError, PlanError) as error:
            refusal = refusal or str(error)
        metas, slots = agree_on_batch(refusal, tensors, grad_slots, self._groups, weighted=weighted)
        if not self._contents_compared:
            compare_contents(tensors, self._groups)
            self._contents_compared = True
        for bit, plan in self._plans.items():
            if plan.evaluates != evaluates:
                continue
            if (metas, slots, weighted) == (plan.metas, plan.grad_slots, plan.weighted):
                return bit, inputs, targets
            if self._static:
                check_static(metas, plan.metas)
        bit = self._free_bit()
        self._plans[bit] = StepPlan(metas, evaluates, weighted, slots)
        return bit, inputs, targets

    def _free_bit(self) -> int:
        """Return a bit without a plan. If all bits have one, drop the least recently used plan.

        All ranks drop the same plan, because all have used their plans in the same order.
        """
        free = next((1 << n for n in range(_MAX_PLANS) if 1 << n not in self._plans), 0)
        if not free:
            free = next(iter(self._plans))
            del self._plans[free]
            remaining = ((key, bits & ~free) for key, bits in self._plan_bits.items())
            self._plan_bits = {key: bits for key, bits in remaining if bits}
        return free
