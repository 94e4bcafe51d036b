"""A plan as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autosplit.dump.tables import milliseconds
from autosplit.planner.plan_search import Configuration
from autosplit.text.figures import few, size_text

if TYPE_CHECKING:
    from autosplit.planner.plan import Plan

_LONGEST = 40  # characters of the name of a block


def search_table(found: Sequence[Configuration], rows: int | None = None) -> str:
    """The best ``rows`` configurations that can run, each beside the best.

    Args:
        found: the best first.
        rows: to show.
    """
    able = [each for each in found if each.solution is not None][:rows]
    table = [[*_cells(each), each.lost or "the best"] for each in able]
    headers = ["schedule", "backward", "N", "M", "size", "memory", "step ms", "bubble", "peak", ""]
    align = ("left", "left", "right", "right", "right", "left", *["right"] * 3, "left")
    text = tabulate(table, headers, colalign=align, disable_numparse=True)
    left_out = sum(each.solution is not None for each in found) - len(able)
    if left_out:
        text += f"\n... and {left_out} more, none faster (--rows shows them)"
    return text


def refused_table(found: Sequence[Configuration]) -> str:
    """A line for each reason why a configuration cannot run; empty if all can."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in found:
        if each.solution is None:
            where = f"M={each.microbatches} {each.memory}" + (" fused" if each.fused else "")
            reasons.setdefault((f"{each.schedule} N={each.stages}", each.lost), []).append(where)
    return "\n".join(
        f"not {what} ({few(where, 3)}): {lost}" for (what, lost), where in reasons.items()
    )


def plan_table(plan: Plan) -> str:
    """A row a stage: its blocks, times, parameters and what it sends."""
    mean = sum(map(sum, plan.stage_times)) / plan.stages
    rows = [
        [
            str(stage),
            str(plan.placement[stage]),
            _short(first),
            _short(last),
            *map(milliseconds, plan.stage_times[stage]),
            f"{sum(plan.stage_times[stage]) / mean:.3f}x" if mean else "",
            size_text(round(plan.stage_parameters[stage])),
            size_text(round(plan.crossing[stage])) if stage < plan.stages - 1 else "",
        ]
        for stage, (first, last) in enumerate(spans(plan))
    ]
    headers = [
        "stage",
        "rank",
        "first block",
        "last block",
        "F ms",
        "I ms",
        "W ms",
        "of mean",
        "parameters",
        "sends",
    ]
    align = ("right", "right", "left", "left", *["right"] * 6)
    return tabulate(rows, headers, colalign=align, disable_numparse=True)


def plan_report(plan: Plan) -> str:
    """The stages, and the step in a line."""
    line = (
        f"plan: {plan.schedule}, N={plan.stages}, M={plan.microbatches}, a step of "
        f"{milliseconds(plan.predicted_step)} ms, bubble {plan.bubble:.1%}, "
        f"{size_text(round(max(plan.peak_memory)))} on the fullest rank"
    )
    if plan.memory_limit is not None:
        line += ", with what operators take for themselves, messages and the batch on top"
    return f"{plan_table(plan)}\n\n{line}"


def spans(plan: Plan) -> list[tuple[str, str]]:
    """For each stage, the names of its first and last block."""
    blocks = plan.made_for.blocks
    firsts = [0, *map(blocks.index, plan.cuts), len(blocks)]
    return [(blocks[first], blocks[last - 1]) for first, last in pairwise(firsts)]


def _cells(one: Configuration) -> list[str]:
    found: Any = one.solution
    return [
        one.schedule,
        "fused" if one.fused else "split",
        str(one.stages),
        str(one.microbatches),
        str(one.microbatch_size),
        str(one.memory),
        milliseconds(found.step),
        f"{found.bubble:.1%}",
        size_text(round(max(found.peaks))),
    ]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"
