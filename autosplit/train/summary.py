"""The report at the end of a training run: what was planned, and what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tabulate import tabulate

from autosplit.dump.tables import milliseconds
from autosplit.planner.plan.plan import Plan
from autosplit.report.plan_tables import plan_table
from autosplit.text.byte_sizes import size_text

from .settings import TrainSettings
from .step_log import StepRecord


def summary(plan: Plan, settings: TrainSettings, records: Sequence[StepRecord]) -> str:
    """The stages, prediction beside measurement, and how the loss went.

    Args:
        plan: what was run.
        settings: what was asked for.
        records: of the steps that were made.
    """
    parts = [plan_table(plan), _measured(plan, records), _losses(records)]
    if settings.checkpoint is not None:
        parts.append(
            f"checkpoint of step {records[-1].step}: {settings.checkpoint} (whole-model names: "
            "autosplit.checkpoint.read_checkpoint gives a state dict)"
        )
    return "\n\n".join(parts)


def _measured(plan: Plan, records: Sequence[StepRecord]) -> str:
    """A row for the step, the bubble, and the memory of each rank."""
    # The first step compiles.
    usual = records[1:] or records
    rows = [
        [
            "step ms",
            milliseconds(plan.predicted_step),
            milliseconds(statistics.median(each.seconds for each in usual)),
        ],
        [
            "bubble",
            f"{plan.bubble:.1%}",
            f"{statistics.median(each.bubble for each in usual):.1%}",
        ],
    ]
    memory = records[-1].memory or ()
    for rank, (foretold, held) in enumerate(zip(plan.peak_memory, memory, strict=True)):
        rows.append([f"memory, rank {rank}", size_text(round(foretold)), size_text(held)])
    headers = [f"{plan.schedule}, N={plan.stages}, M={plan.microbatches}", "planned", "measured"]
    return tabulate(rows, headers, colalign=("left", "right", "right"), disable_numparse=True)


def _losses(records: Sequence[StepRecord]) -> str:
    first, last = records[0], records[-1]
    tokens = sum(round(each.tokens_per_s * each.seconds) for each in records)
    speed = statistics.median(each.tokens_per_s for each in records[1:] or records)
    return (
        f"loss {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}; "
        f"{tokens:,} tokens, {speed:,.0f} a second"
    )
