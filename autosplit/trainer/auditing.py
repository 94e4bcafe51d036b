"""``Auditor``: after a few measured steps, a rank runs actions again while it waits."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch

from autosplit.errors import AuditError
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


_ADVICE = (
    "If its operators are deterministic (torch.use_deterministic_algorithms), the rank's device or "
    "memory is faulty: exclude it, and go on from a checkpoint"
)


class Auditor:
    """Measures the first steps, and then has actions run again in waits that are long enough.

    Args:
        groups: the trainer's process groups.
        device: the device of the stages.
        goes_on: whether ranks warn of a difference and train on; else it is an error.

    Attributes:
        period: the number of steps in which every action but ``never`` runs again once; None
            before enough steps are measured.
        never: the actions that are not audited, of all ranks of the pipeline.
        marks: texts on the differences of all ranks so far, if the ranks train on.
        spans: when actions ran again in the last step, on this rank.
    """

    period: int | None = None
    never: tuple[Action, ...] = ()

    def __init__(self, groups: Groups, device: torch.device, *, goes_on: bool) -> None:
        self._groups, self._device, self._goes_on = groups, device, goes_on
        self.marks: list[str] = []
        self.spans: list[Span] = []
        self._texts: list[str] = []
        self._measured: list[list[Span]] = []
        self._plan = AuditPlan({}, [], [])
        self._late_interval = 1
        self._schedule: Schedule | None = None
        self._step = 0

    def arrange_audits(self, executor: Executor, stages: Mapping[int, Any]) -> None:
        """Set the audits of the next step; none if it runs another schedule than the planned one,
        as for another number of microbatches.
        """
        self.spans = []
        if executor.schedule != self._schedule:
            executor.set_audits((), ())
            return
        self._step += 1
        rank, step, late = self._groups.everybody.rank, self._step, self._plan.late
        audited = [(place, row[step % len(row)]) for place, row in self._plan.waits.items()]
        turn, rest = divmod(step, self._late_interval)
        if late and not rest:
            audited.append((None, late[turn % len(late)]))
        audits = [
            (place, ActionAudit(action, stages[action.stage], rank, self._device))
            for place, action in audited
        ]
        rows = [[*audit.wraps()] for _, audit in audits]
        # The functions around next actions are the outermost: an audit replaces what it wraps.
        wraps = [row[0] for row in rows] + [wrap for row in rows for wrap in row[1:]]
        executor.set_audits(
            wraps, [(place, partial(self._run_again, audit)) for place, audit in audits]
        )

    def _run_again(self, audit: ActionAudit) -> None:
        """Run an audited action again.

        Raises:
            AuditError: a tensor has other bits.
        """
        start = perf_counter()
        text = audit.run_again()
        self.spans.append(Span(self._groups.rank, audit.action, start, perf_counter()))
        if text and not self._goes_on:
            raise AuditError(f"{text}. No optimizer has used the step. {_ADVICE}")
        self._texts += [text] if text else []

    def _share_marks(self) -> None:
        """Exchange the texts of a step, and warn of each; collective."""
        texts = list(itertools.chain(*self._groups.everybody.gather(self._texts)))
        for text in texts:
            warnings.warn(f"{text}. The step goes on (audit='mark'). {_ADVICE}", stacklevel=2)
        self.marks += texts
        self._texts.clear()

    def measure_step(
        self, spans: list[Span], schedule: Schedule, stages: Mapping[int, Any]
    ) -> None:
        """Record a step; plan the audits when enough are measured. Collective."""
        if self._goes_on:
            self._share_marks()
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
        plans = self._groups.gather(self._plan)
        self._late_interval = max(plan.late_interval for plan in plans)
        self.period = max(
            steps
            for plan in plans
            for steps in (self._late_interval * len(plan.late), *map(len, plan.waits.values()))
        )
        self.never = tuple(action for plan in plans for action in plan.never)
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
