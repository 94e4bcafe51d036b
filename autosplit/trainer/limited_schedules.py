"""The schedules of steps within a memory limit, whose microbatches differ from step to step.

a step's list  ──►  the schedule of an earlier search that covers its microbatches
               └►  a search for this list, on all ranks together, remembered
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import BatchError
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_set import MicrobatchSizes
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.trainer.rank_memory import LargestMicrobatches
from autosplit.trainer.step_plans import Kind, StepPlan
from autosplit.trainer.tuning import ListBudget, Tuner


@dataclass(frozen=True, eq=False)
class LimitedSchedule:
    """A schedule that keeps the memory limit for microbatches up to certain sizes.

    Attributes:
        schedule: the schedule, for the largest number of microbatches.
        budget: the bytes of microbatches that each rank may keep, for orders of lists.
        kind: the kind of the microbatches.
        largest_sizes: by pipeline of the search, the sizes of its largest microbatches.
        batch_elements: the most elements of a batch's inputs.
        largest: the largest microbatches of this rank's pipeline.
    """

    schedule: Schedule
    budget: ListBudget
    kind: Kind
    largest_sizes: Sequence[Sequence[MicrobatchSizes]]
    batch_elements: int
    largest: LargestMicrobatches

    def covers(self, plan: StepPlan) -> bool:
        """Whether a step has no more and no larger microbatches than this schedule allows; equal on
        all ranks."""
        return (
            plan.kind == self.kind
            and len(plan.microbatches) <= self.schedule.microbatches
            and _elements(plan.microbatches) <= self.batch_elements
            and any(
                all(any(map(sizes.fits_within, larger)) for sizes in plan.microbatches)
                for larger in self.largest_sizes
            )
        )


class LimitedSchedules:
    """The schedules that searches within the memory limit have found; equal on all ranks.

    Args:
        tuner: searches the schedules.
        microbatches: M; each search is for at least M microbatches.
        one_order: whether all pipelines must run one schedule in a step, whatever their sizes.

    Attributes:
        schedules: the schedules, in the order of the searches.
    """

    def __init__(self, tuner: Tuner, microbatches: int, *, one_order: bool) -> None:
        self._tuner, self._most, self._one_order = tuner, microbatches, one_order
        self.schedules: list[LimitedSchedule] = []

    def covering(self, plan: StepPlan) -> LimitedSchedule | None:
        """The earliest schedule for a step, or the last with ``one_order``; None if a search is
        needed first.
        """
        candidates = self.schedules[-1:] if self._one_order else self.schedules
        return next((limited for limited in candidates if limited.covers(plan)), None)

    def search(
        self, plan: StepPlan, stages: Mapping[int, TrainableStage], largest: LargestMicrobatches
    ) -> None:
        """Search and remember a schedule for the steps of all pipelines, and for as many
        microbatches as any step had so far; collective.

        The search first assumes that all microbatches are as large as the largest one, so that
        later steps need no search. If it finds no schedule, it assumes the sizes of this batch.

        Args:
            plan: the plan of this rank's pipeline, with ``uncovered`` plans of all.
            stages: this rank's stages.
            largest: the largest microbatches of this rank's pipeline.

        Raises:
            BatchError: on all ranks: no schedule was found within the limit.
        """
        plans = plan.uncovered
        self._most = max(self._most, *(len(other.microbatches) for other in plans))
        sizes = [[other.microbatches[at] for at in other.largest] for other in plans]
        text, elements = _largest_text(plans), _elements_of_largest(sizes)
        full = self._most * max(size.elements for row in sizes for size in row)
        batches = {full, max(_elements(other.microbatches) for other in plans)}
        refusal = BatchError()
        for batch in sorted(batches, reverse=True):
            count = largest.batch_bytes * batch / max(_elements(plan.microbatches), 1)
            row = largest._replace(batch_bytes=math.ceil(count))
            try:
                result = self._tuner.search_within(stages, self._most, elements, row, text)
            except BatchError as error:
                refusal = error
                continue
            self.schedules.append(LimitedSchedule(*result, plan.kind, sizes, batch, row))
            return
        raise refusal

    def search_again(self, stages: Mapping[int, TrainableStage]) -> None:
        """Search all schedules again, for the times that are measured now; collective."""
        for at, limited in enumerate(self.schedules):
            schedule, elements = limited.schedule, _elements_of_largest(limited.largest_sizes)
            count, largest = schedule.microbatches, limited.largest
            result = self._tuner.search_within(stages, count, elements, largest, "", schedule)
            self.schedules[at] = replace(limited, schedule=result[0], budget=result[1])


def _elements(microbatches: Sequence[MicrobatchSizes]) -> int:
    """The number of elements of all inputs."""
    return sum(sizes.elements for sizes in microbatches)


def _largest_text(plans: Sequence[StepPlan]) -> str:
    """The number and the sizes of the largest microbatch, for messages."""
    plan = max(plans, key=lambda plan: plan.microbatches[plan.largest[0]].elements)
    number = plan.largest[0]
    sizes = plan.microbatches[number].inputs
    return f"microbatch {number}, of the sizes {', '.join(map(str, sizes))},"


def _elements_of_largest(sizes: Sequence[Sequence[MicrobatchSizes]]) -> int:
    """The number of elements of the smallest of the largest microbatches, at least 1. A search
    computes times for this size, and bytes per element from it."""
    return max(min(largest.elements for row in sizes for largest in row), 1)
