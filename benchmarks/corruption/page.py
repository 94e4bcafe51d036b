"""The page of what came of all faults."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from ..kept_ranks import KeptRanks
from ..page import Page, Part, option
from ..results import Rows, Target, table
from . import cost, replayed, timeline
from .faults import BITS, KINDS, faults
from .judge import clean, judge

HERE = pathlib.Path(__file__).parent
TEMPLATE = """\
# Faults that change numbers

Written by `python -m benchmarks.corruption`; do not edit. {environment}.
{sections}
Measure again: `{commands}`.
"""
_ABOUT = """\
A pipeline of two or four ranks trains with `RunOptions(audit=True, recorder=Recorder(...))`, 1F1B
with full backwards, and `gpipe` for deferred tensors. A fault happens in each step, on one rank. A
bit of the mantissa flips: in what an action computes, in a tensor while its stage holds it, in a
message, in a parameter between two actions, or in a reduced gradient. Or an input makes an operator
return NaN, or a target is infinite. Every action is audited, those that no wait follows once in
many steps: a bit in what one computes or leaves is found if all ranks raise within the period of
the audits, and named right if all name the rank and the action. Of the others the recorder writes
the step, and a replay names rank and action, and the sample of a bad input or target. No alarm sees
a bit of a message, or of a parameter without replicas: a predicate asks for
such a step. A bit of a "held" tensor flips between the action that leaves it and the next, with
`Recorder(digests="all")`: an alarm of the same step. Audits are planned for given times, so that
all machines have the same."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which faults are tried."""

    faults: int = option(300, "the number of faults")
    clean: int = option(10_000, "steps without a fault, half of them on two ranks")
    select: str = option("", "only faults whose name matches this pattern")
    width: int = option(512, "of the layers whose steps are timed")
    rounds: int = option(60, "steps that are timed, with and without audits in turns")
    layers: int = option(32, "of the Llama stage whose actions are replayed")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each fault, and one for the clean steps on each number of ranks."""
    launched = KeptRanks()
    try:
        for fault in faults(settings.faults):
            if re.search(settings.select, fault.name):
                yield judge(launched, fault)
        for ranks in (2, 4) if settings.clean else ():
            yield clean(launched, ranks, settings.clean // 2)
    finally:
        launched.end()


def render(rows: Rows) -> str:
    """How many were found and named right, by kind."""
    tried = [row for row in rows if row["kind"] != "clean"]
    quiet = [row for row in rows if row["kind"] == "clean"]
    lines = []
    for kind in KINDS:
        same = [row for row in tried if row["kind"] == kind]
        if same:
            steps = [row["steps"] for row in same if row["found"]]
            late = max(steps, default=0) if kind in BITS else ""
            period = max(row["period"] for row in same) if kind in BITS else ""
            found, named = (sum(row[key] for row in same) for key in ("found", "named"))
            lines.append([kind, len(same), found, named, late, period])
    head = ["fault", "tried", "found", "named right", "most steps until found", "period"]
    found, named = (sum(row[key] for row in tried) for key in ("found", "named"))
    wrong = [row for row in tried if not row["named"]]
    texts = [
        f"- {row['name']}, {row['action']}: {row['text'].partition(chr(10))[0] or 'not found'}"
        for row in wrong[:20]
    ]
    alarms, steps = (sum(row[key] for row in quiet) for key in ("alarms", "steps"))
    return f"""\
**{found} of {len(tried)} faults** were found, and {named} named right. In {steps:,} clean steps
there were {alarms} false alarms.

{table(head, lines)}
""" + "".join(f"\n{text}" for text in texts)


SHARE = Target("over neither", at_most=1.01)

_COST = """\
Steps of two blocks a rank: with `RunOptions(recorder=Recorder(...))`, with
`Recorder(digests="all")` and with `RunOptions(audit=True)`, each in turns with steps of the same
trainer with neither; medians. Waits and actions are measured by the trainer. The C library keeps
freed memory, so that page faults, which come by chance, do not hide what is measured. The period is
in steps. Medians do not show the few steps with an audit that no wait hides, by which the plan
lengthens the mean step by at most 1%."""


def measure_cost(settings: Settings) -> Iterator[dict[str, Any]]:
    """The rows of ``cost.measure``."""
    launched = KeptRanks()
    try:
        yield from cost.measure(launched, settings.width, settings.rounds)
    finally:
        launched.end()


def render_cost(rows: Rows) -> str:
    """A step's time, its multiples with the recorder and with audits, and what is audited."""
    lines = [
        [
            row["name"],
            f"{1e3 * row['without']:.1f}",
            SHARE.cell(row["recorded"]),
            f"{row['all digests']:.3f}",
            SHARE.cell(row["audited"]),
            f"{row['covered']} of {row['actions']}",
            row["period"],
        ]
        for row in rows
    ]
    heads = ["", "ms", f"recorder {SHARE.title}", "all digests", f"audits {SHARE.title}"]
    return table([*heads, "audited actions", "period"], lines)


REPLAY = Target("seconds", at_most=10.0, style=".1f")

_REPLAY = """\
`autosplit replay FOLDER --action ...` on a stage with the layers of a Llama, in a pipeline of three
stages and four microbatches, in seconds: the whole command, of which reading the bundle and its
programs, and running the action again with what it needs of earlier ones. The rest is the start of
Python and torch. In one microbatch, an embedding is NaN, and the replay also looks for the operator
and the sample. The bundle is in the cache of files. Medians of three."""


def measure_replay(settings: Settings) -> Iterator[dict[str, Any]]:
    """The rows of ``replayed.measure`` for a narrow and a wider stage."""
    for width in (64, 512):
        yield from replayed.measure(settings.layers, width)


def render_replay(rows: Rows) -> str:
    """The seconds of each command, and what the replay says."""
    lines = [
        [
            row["name"],
            row["layers"],
            f"{row['bytes'] / 2**20:.0f}",
            REPLAY.cell(row["command"]),
            f"{row['reading']:.2f}",
            f"{row['running']:.2f}",
            row["text"].partition("\n")[0] or "no fault",
        ]
        for row in rows
    ]
    heads = ["action", "layers", "MiB", REPLAY.title, "reading", "running", "it says"]
    return table(heads, lines)


_TIMELINE = """\
A step of four ranks with `RunOptions(audit="mark", record=True)`. F and B also sleep, so that four
ranks run on any two cores. A bit of a weight gradient flips in one backward of one rank. When this
rank has nothing else to do, it runs the action again, and then a third time, to know which run was
wrong. All ranks warn, and go on."""


def measure_timeline(_: Settings) -> Iterator[dict[str, Any]]:
    """The rows of ``timeline.measure``."""
    launched = KeptRanks()
    try:
        yield from timeline.measure(launched)
    finally:
        launched.end()


def render_timeline(rows: Rows) -> str:
    """The picture, and the warning of all ranks."""
    return f"![the timeline of a step with audits](timeline.png)\n\n    {rows[0]['text']}"


PAGE = Page(
    "corruption",
    TEMPLATE,
    {
        "corruption": Part("Found and named", _ABOUT, measure, render),
        "cost": Part("The cost of the recorder and of audits", _COST, measure_cost, render_cost),
        "timeline": Part(
            "A step with a fault and audits", _TIMELINE, measure_timeline, render_timeline
        ),
        "replay": Part("The replay of one action", _REPLAY, measure_replay, render_replay),
    },
    Settings,
    keeping=True,
)
