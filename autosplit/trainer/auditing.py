"""``Auditor``: after a few measured steps, a rank runs actions again while it waits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from autosplit.passes.analysis.operators import may_draw
from autosplit.passes.subgraph import inner_calls
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.simulation.audit_gaps import AuditPlan, plan_audits
from autosplit.pipeline.simulation.simulate import Span, median_durations
from autosplit.ranks.groups import Groups
from autosplit.recorder.audit import ActionAudit
from autosplit.stage import Stage
from autosplit.torch_internals.autograd import has_tensor_hooks
from autosplit.trainer.tuning import MEASURED

_LOG = logging.getLogger(__name__)


class Auditor:
    """Measures the first steps, and then has actions run again in waits that are long enough.

    Args:
        groups: the trainer's process groups.
        device: the device of the stages.

    Attributes:
        period: the number of steps in which every action but ``never`` runs again once; None
            before enough steps are measured.
        never: the actions that are not audited, of all ranks of the pipeline.
    """

    period: int | None = None
    never: tuple[Action, ...] = ()

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._measured: list[list[Span]] = []
        self._plan = AuditPlan({}, [])
        self._schedule: Schedule | None = None
        self._step = 0

    def arrange_audits(self, executor: Executor, stages: Mapping[int, Any]) -> None:
        """Set the audits of the next step; none if it runs another schedule than the planned one,
        as for another number of microbatches.
        """
        if executor.schedule != self._schedule:
            executor.set_audits((), {})
            return
        self._step += 1
        audits = {
            place: ActionAudit(
                action, stages[action.stage], self._groups.everybody.rank, self._device
            )
            for place, actions in self._plan.waits.items()
            for action in [actions[self._step % len(actions)]]
        }
        wraps = [wrap for audit in audits.values() for wrap in audit.wraps()]
        executor.set_audits(wraps, {place: audit.run_again for place, audit in audits.items()})

    def measure_step(
        self, spans: list[Span], schedule: Schedule, stages: Mapping[int, Any]
    ) -> None:
        """Record a step; plan the audits when enough are measured, which is collective."""
        self._measured.append(spans)
        if self.period is not None or len(self._measured) <= MEASURED:
            return
        seconds: dict[tuple[int, ActionKind], float] = {}
        for times in self._groups.gather(median_durations(self._measured[1:])):
            seconds |= times
        self._schedule = schedule
        self._plan = plan_audits(
            schedule, self._groups.rank, seconds, lambda action: _can_repeat(action, stages)
        )
        longest = max(map(len, self._plan.waits.values()), default=0)
        rows = self._groups.gather((longest, self._plan.never))
        self.period = max(length for length, _ in rows)
        self.never = tuple(action for _, row in rows for action in row)
        _LOG.info("audits: every action once in %d steps, but %s", self.period, self.never)


def _can_repeat(action: Action, stages: Mapping[int, Any]) -> bool:
    """Whether an action can run again with the same results and without effects."""
    stage = stages[action.stage]
    if type(stage) is not Stage or stage.sharding.groups:
        return False
    functions = stage.functions
    if action.kind is ActionKind.FORWARD:
        return not (functions.updated_state or functions.capture.values)
    backward = functions.graphs.backward
    draws = backward is None or any(map(may_draw, inner_calls(backward.graph)))
    return not (draws or functions.written or has_tensor_hooks(stage.module.parameters()))
