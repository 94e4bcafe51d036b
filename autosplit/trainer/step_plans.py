"""Step plans: ranks agree on the stages and the executor that run a batch.

Each rank numbers its plans by bits. A plan has the same bit on all ranks:

    batch -> signature -> bits of the plans that may fit -> AND over all ranks
                                                              |            |
                                              a common bit: that plan      none: a new signature
                                                                           |
                     all ranks of each pipeline offer the same list of microbatches, whose sizes the
                     graphs of all stages fit: each rank adds the plan alone
                                                                           | else
                     ranks exchange shapes and dtypes, and all look up or add the same plan
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autosplit.capture.size_rule import Leaf, leaf_text
from autosplit.errors import BatchError, PipelineError, PlanError
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.stage_builder import check_inputs
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.stage_set import MicrobatchSizes
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import Groups
from autosplit.runtime.functions import SplitFunctions
from autosplit.trainer.aux_losses import WithAuxLosses
from autosplit.trainer.batch_agreement import (
    AgreedBatch,
    Metas,
    OfferedBatch,
    agree_on_batch,
    by_microbatch,
    check_weights,
    compare_contents,
    digest_of,
)
from autosplit.trainer.batches import (
    Batch,
    BatchSlot,
    BatchSplitter,
    Microbatches,
    MicrobatchList,
    chunk_sizes,
    signature,
)
from autosplit.trainer.loss_gradients import StepWeights
from autosplit.trainer.step_metrics import batch_counts

_MAX_PLANS = 63  # the bits of an int64 that is not negative
_COUNT_BITS = 16
"""Bits of the number of microbatches, beside the digest of their sizes."""

Kind = Hashable
"""Paths, dtypes and numbers of dimensions of a microbatch's tensors, without sizes."""


@dataclass
class StepPlan:
    """The stages and the executor that run microbatches of certain sizes on this rank.

    Attributes:
        metas: shapes and dtypes of the batch's tensors, by path.
        evaluates: whether the step is an evaluation, which only runs forwards.
        microbatches: the sizes of each microbatch.
        pipeline_counts: the number of microbatches of each pipeline.
        kind: the kind of the microbatches: paths, dtypes and numbers of dimensions of their
            tensors.
        listed: whether the user passed a list of microbatches, and not a batch that is cut.
        is_weighted: whether the microbatches have weights.
        grad_slots: the tensors of the batch that need a gradient, on any rank.
        uncovered: the plans of all pipelines, if a schedule within the memory limit must be
            searched for them before the step; else empty.
        is_built: whether stages and executor are built, or can be built without a message.
        boundaries: by microbatch, shapes and dtypes of the tensors between stages.
        dtype: the dtype of the losses; valid after the plan's first step.
        stages: this rank's stages, in training; empty before the plan's first step.
        functions: the stages' graphs, known after a step whose microbatches all have one size;
            empty if a stage has no graph.
        largest_functions: for each of ``largest``, the graphs of this rank's stages at its sizes;
            empty until they are known.
        schedule: the schedule of the step; valid once there is an executor.
        executor: runs the stages; None until the first such batch.
        loss_grads: by microbatch, the gradients of the last stage's outputs, in training.
        aux: this rank's stages with auxiliary losses; empty if there are none.
    """

    metas: Metas
    evaluates: bool
    microbatches: Sequence[MicrobatchSizes]
    pipeline_counts: Sequence[int]
    kind: Kind
    listed: bool = False
    is_weighted: bool = False
    grad_slots: frozenset[BatchSlot] = frozenset()
    uncovered: Sequence[StepPlan] = ()
    is_built: bool = False
    boundaries: Sequence[Boundaries] = ()
    dtype: torch.dtype = torch.float32
    stages: Mapping[int, TrainableStage] = field(default_factory=dict)
    functions: Sequence[SplitFunctions] = ()
    largest_functions: list[dict[int, SplitFunctions]] = field(default_factory=list)
    schedule: Schedule = field(init=False, repr=False)
    executor: Executor | None = None
    loss_grads: Sequence[list[Tensor | None]] = ()
    aux: Sequence[WithAuxLosses] = ()

    @cached_property
    def counts(self) -> dict[str, int]:
        """The batch's numbers of ``"samples"`` and ``"tokens"``; a number that is unknown is left
        out.
        """
        return batch_counts(self.metas)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one microbatch in this rank's stages."""
        return sum(functions.flops for functions in self.functions)

    @cached_property
    def largest(self) -> Sequence[int]:
        """The numbers of the largest microbatches: every other one is in no dimension larger than
        one of them. The one with the most elements is the first.
        """
        sizes, numbers = self.microbatches, list[int]()
        for number in sorted(range(len(sizes)), key=lambda at: -sizes[at].elements):
            if not any(sizes[number].fits_within(sizes[at]) for at in numbers):
                numbers.append(number)
        return numbers


class StepPlans:
    """The step plans of this rank, numbered as on all other ranks.

    Args:
        splitter: cuts this rank's batches.
        seeds: the seeds of steps. Ranks agree on seeds and plan in one collective.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        modules: this rank's modules by stage.
        microbatches: M, the number of microbatches into which a batch is cut.
        source: the rank whose stage takes the batch's first input. It alone chooses the plan of a
            step that does not wait.
        is_known: whether this rank knows that all stages can run the microbatches of a plan.
        check: called with the training plans of pipelines; returns them if a schedule must be
            searched for them, else none. Raises BatchError, equally on all ranks, if one has no
            schedule.
        equal_counts: whether all pipelines must run equally many microbatches, because their ranks
            gather the parameters of sharded stages together for each.
    """

    def __init__(
        self,
        splitter: BatchSplitter,
        seeds: StageSeeds,
        groups: Groups,
        dataflow: StageDataflow,
        modules: Mapping[int, nn.Module],
        *,
        microbatches: int,
        source: int,
        is_known: Callable[[StepPlan], bool],
        check: Callable[[Sequence[StepPlan]], Sequence[StepPlan]],
        equal_counts: bool,
    ) -> None:
        self._splitter, self._seeds, self._groups = splitter, seeds, groups
        self._dataflow, self._modules = dataflow, modules
        self._count, self._source = microbatches, source
        self._is_known, self._check = is_known, check
        self._equal_counts = equal_counts
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
        batch: Batch | MicrobatchList | None,
        weights: StepWeights | None,
        *,
        evaluates: bool,
        waits: bool = True,
    ) -> tuple[StepPlan, Microbatches, Microbatches]:
        """Return (step plan that all ranks agreed on, inputs by microbatch, targets by microbatch).

        If any rank refuses the batch, nothing has changed. Collective.

        Args:
            batch: this rank's batch, or its list of microbatches.
            weights: the weights of its microbatches, if any.
            evaluates: whether the step is an evaluation.
            waits: whether to wait for the other ranks first.

        Raises:
            BatchError: a rank refuses the batch.
            PipelineError: the step does not wait, and this rank has a batch of another shape than
                other ranks.
        """
        refusal = "" if weights is None else weights.refusal
        length = None if weights is None else weights.length
        key = evaluates, length, signature(batch)
        fitting = 0 if refusal else self._plan_bits.get(key, 0)
        new = None if fitting or refusal else self._plan_of_list(batch, length, evaluates)
        weights_digest = 0 if weights is None else digest_of(weights.numbers)
        offer = weights_digest << _COUNT_BITS if fitting else 0
        if new is not None:
            digest = digest_of((evaluates, weights_digest, new.metas))
            offer = digest << _COUNT_BITS | len(new.microbatches)
        common, *numbers = self._common_plans(fitting, offer, evaluates=evaluates, waits=waits)
        self._seeds.begin_step(*numbers[:2], evaluates=evaluates)
        agreed = self._agreed_offers(numbers[2:])
        counts = [offer & (1 << _COUNT_BITS) - 1 for offer in agreed if offer is not None]
        if common:
            if None in agreed:
                check_weights(agreed, self._groups)
            bit = common & -common
            if not fitting & bit:
                self._refuse_late(batch)
        elif all(counts) and len(counts) == len(agreed):
            if new is None or len(new.microbatches) != counts[self._groups.layout.index]:
                self._refuse_late(batch)
            self._check_counts(counts)
            bit = self._add(replace(new, pipeline_counts=counts, is_built=True))
        else:
            offered = refusal, length, weights_digest
            bit = self._agree_on_new_shape(batch, *offered, evaluates=evaluates)
        self._plan_bits[key] = self._plan_bits.get(key, 0) | bit
        plan = self._plans[bit] = self._plans.pop(bit)  # now the most recently used
        self._seeds.microbatches = max(plan.pipeline_counts)
        return plan, *self._splitter.split(batch, len(plan.microbatches))

    def _refuse_late(self, batch: Batch | MicrobatchList | None) -> NoReturn:
        """Raise the error of a rank whose batch differs from that of other ranks, which have not
        waited for it.
        """
        self._splitter.check_batch(batch)
        raise PipelineError(
            "this rank has a batch of another shape than the other ranks, which already "
            "run the step, as step_async() does not wait: pass the same batch on every "
            "rank"
        )

    def _plan_of_list(
        self, batch: Batch | MicrobatchList | None, weights: int | None, evaluates: bool
    ) -> StepPlan | None:
        """Return a new plan for a list of microbatches, without communication. None if this rank
        does not have the whole list, or does not know that all stages have graphs.
        """
        if not isinstance(batch, MicrobatchList) or not self._contents_compared:
            return None
        try:
            leaves = self._splitter.check_batch(batch)
            if not evaluates and self._splitter.requiring_grad(batch):
                return None
            agreed = AgreedBatch(_metas(leaves), len(batch.batches or ()), {weights})
            plan = self._plan_of(agreed, weights is not None, evaluates)
            if not evaluates and self._check([plan]):
                return None  # ranks search its schedule together
        except PipelineError:
            return None  # ranks agree on the refusal
        return plan if self._is_known(plan) else None

    def _common_plans(self, fitting: int, offer: int, *, evaluates: bool, waits: bool) -> list[int]:
        """Agree with all ranks on the plans that fit the batch; collective.

        Args:
            fitting: a bit mask of the plans that fit on this rank; 0 if it has not seen the
                signature of its batch.
            offer: the digest and the number of microbatches of the new plan that this rank can
                build without communication; of a known plan, the digest of the weights; else 0.
            evaluates: whether the step is an evaluation.
            waits: whether to wait for all ranks. If False, the mask of the rank whose stage takes
                the first input of the batch is used.

        Returns:
            The bit mask of the plans that fit on all ranks; then the seeds' numbers of
            ``StageSeeds.offer``; then for each pipeline two numbers. These are complements if the
            pipeline's ranks offer the same.
        """
        layout = self._groups.layout
        offers = [-1] * 2 * len(layout.pipelines)  # neutral to AND
        has_plan = fitting or offer
        offers[2 * layout.index : 2 * layout.index + 2] = offer, ~offer if has_plan else 0
        groups, seeds = self._groups, self._seeds.offer(evaluates=evaluates)
        numbers = fitting, *seeds, *offers
        if groups.everybody.ranks == 1:
            return [*numbers]
        if waits or len(layout.pipelines) > 1:
            return groups.everybody.all_reduce_and(*numbers)
        return groups.broadcast(numbers, self._source)

    def _agree_on_new_shape(
        self,
        batch: Batch | MicrobatchList | None,
        refusal: str,
        weights: int | None,
        weights_digest: int,
        *,
        evaluates: bool,
    ) -> int:
        """Find or add the plan for a batch that some rank has not seen or refuses; collective.

        Returns:
            The plan's bit.

        Raises:
            BatchError: a rank refuses the batch.
        """
        leaves, grad_slots = dict[str, Any](), list[BatchSlot]()
        try:
            leaves = self._splitter.check_batch(batch)
            if not evaluates:
                grad_slots = [*self._splitter.requiring_grad(batch)]
            inputs = self._splitter.first_inputs(batch)
            check_inputs(self._modules, self._dataflow, inputs)
        except (PipelineError, PlanError) as error:
            refusal = refusal or str(error)
        length = None if batch is None else 0
        if isinstance(batch, MicrobatchList) and not refusal:
            length = len(batch.batches or ())
        metas = _metas(leaves)
        offered = OfferedBatch(refusal, metas, grad_slots, weights, weights_digest, length)
        batches, slots = agree_on_batch(offered, self._groups)
        if not self._contents_compared:
            compare_contents(leaves, self._groups)
            self._contents_compared = True
        is_weighted = weights is not None
        plans = [self._plan_of(agreed, is_weighted, evaluates) for agreed in batches]
        self._check_pipelines(plans)
        plan = plans[self._groups.layout.index]
        plan.grad_slots, plan.pipeline_counts = slots, [len(plan.microbatches) for plan in plans]
        return self._add(plan)

    def _check_pipelines(self, plans: Sequence[StepPlan]) -> None:
        """Check the plans of all pipelines, with the same result on all ranks.

        Raises:
            BatchError: no step may run one of the plans, or replicas have microbatches of different
                kinds.
        """
        self._check_counts([len(plan.microbatches) for plan in plans])
        if not plans[0].evaluates:
            plans[self._groups.layout.index].uncovered = self._check(plans)
        for plan in plans:
            if plan.kind != plans[0].kind:
                raise BatchError(
                    "replicas of the pipeline pass microbatches of different structures, dtypes or "
                    "numbers of dimensions: only sizes and values of numbers may differ"
                )

    def _check_counts(self, counts: Sequence[int]) -> None:
        """Check that pipelines whose ranks gather parameters together run equally many
        microbatches.

        Raises:
            BatchError: they do not.
        """
        if self._equal_counts and len({*counts}) > 1:
            raise BatchError(
                f"replicas of the pipeline pass {', '.join(map(str, counts))} microbatches, but "
                "they gather the parameters of sharded stages together, for each microbatch. Pass "
                "equally many, or keep the parameters gathered for the step: "
                'StageOptions(sharding={"reshard_after_forward": False})'
            )

    def _plan_of(self, agreed: AgreedBatch, is_weighted: bool, evaluates: bool) -> StepPlan:
        """Return a new plan for a pipeline's batch.

        Raises:
            BatchError: there are more weights, or fewer, than microbatches.
        """
        if agreed.microbatches:
            passed = by_microbatch(agreed.metas)
            rows = [passed.get(number, {}) for number in range(agreed.microbatches)]
        else:
            rows = _cut_metas(agreed.metas, self._count)
        agreed.check_weights(len(rows))
        kind = tuple((path, *_form(meta)) for path, meta in rows[0].items())
        return StepPlan(
            agreed.metas,
            evaluates,
            [self._sizes_of(row) for row in rows],
            [len(rows)],
            kind,
            bool(agreed.microbatches),
            is_weighted,
        )

    def _sizes_of(self, metas: Metas) -> MicrobatchSizes:
        """The sizes of a microbatch; empty for an input that no rank has passed."""
        parts: dict[str, list[Leaf]] = {"inputs": [], "targets": []}
        numbers = {path: self._splitter.number_of(path) for path in metas}
        for path in sorted(metas, key=numbers.__getitem__):
            part, meta = parts[path.partition("[")[0].partition(".")[0]], metas[path]
            if self._dataflow.wiring is not None and part is parts["inputs"]:
                part += [""] * (numbers[path] - len(part))
            part.append(meta if isinstance(meta, str) else tuple(meta.shape))
        return MicrobatchSizes(tuple(parts["inputs"]), tuple(parts["targets"]))

    @staticmethod
    def _agreed_offers(offers: Sequence[int]) -> list[int | None]:
        """The offer of each pipeline's ranks; None if their offers differ."""
        pairs = zip(offers[::2], offers[1::2], strict=True)
        return [offer if offer == ~complement else None for offer, complement in pairs]

    def _add(self, plan: StepPlan) -> int:
        """Add a plan, unless there is one for the same microbatches; return its bit.

        If all bits have plans, the least recently used plan is dropped. All ranks drop the same
        plan, as all have used their plans in the same order.
        """
        if not plan.listed:
            for bit, earlier in self._plans.items():
                if _identity(earlier) == _identity(plan):
                    return bit
        free = next((1 << n for n in range(_MAX_PLANS) if 1 << n not in self._plans), 0)
        if not free:
            free = next(iter(self._plans))
            del self._plans[free]
            remaining = ((key, bits & ~free) for key, bits in self._plan_bits.items())
            self._plan_bits = {key: bits for key, bits in remaining if bits}
        self._plans[free] = plan
        return free


def _identity(plan: StepPlan) -> tuple[object, ...]:
    return plan.evaluates, plan.listed, plan.metas, plan.grad_slots, plan.is_weighted


def _metas(leaves: Mapping[str, Any]) -> Metas:
    return {
        path: TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf_text(leaf)
        for path, leaf in leaves.items()
    }


def _form(meta: TensorMeta | str) -> tuple[Hashable, ...]:
    return ("",) if isinstance(meta, str) else (meta.dtype, len(meta.shape))


def _cut_metas(metas: Metas, count: int) -> list[Metas]:
    """The shapes and dtypes of each microbatch of a batch that is cut."""
    tensors = {path: meta for path, meta in metas.items() if isinstance(meta, TensorMeta)}
    samples = next((meta.shape[0] for meta in tensors.values() if meta.shape), count)
    return [
        {
            path: replace(meta, shape=torch.Size([size, *meta.shape[1:]])) if meta.shape else meta
            for path, meta in tensors.items()
        }
        for size in chunk_sizes(samples, count)
    ]
