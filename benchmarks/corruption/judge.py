"""Runs one fault, and says whether it was found and named right."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from autosplit.recorder.bundle import read_parts
from autosplit.recorder.faults import FaultSearch
from autosplit.recorder.replay import StepReplay

from .faults import BITS, Fault
from .subject import Outcome, run

_LIMIT = 180.0
_ROOT = pathlib.Path(__file__).parents[2]


def judge(launched: Callable[..., Any], fault: Fault) -> dict[str, Any]:
    """Run a fault, and return its row."""
    with tempfile.TemporaryDirectory() as name:
        outcomes = launched(run, fault.ranks, (fault, name, fault.ranks, 0), timeout=_LIMIT)
        outcome = outcomes[0]
        bundles = sorted(pathlib.Path(name).glob("*-step-*[0-9]"), key=_step_of)
        first = _replayed(bundles[0]) if bundles and fault.kind not in BITS else ""
    errors = [outcome.text for outcome in outcomes]
    expected = f"rank {outcome.rank}: {outcome.action} had other bits"
    found = all("had other bits when it ran again" in text for text in errors)
    named = all(expected in text for text in errors)
    # An audit may find a held tensor before the action that takes it.
    if fault.kind not in BITS and not (fault.kind == "held" and named):
        found = bool(first) and ("no fault" not in first or fault.kind == "reduction")
        named = _is_right(fault, outcome, first)
    return {
        "name": fault.name,
        "kind": fault.kind,
        "ranks": fault.ranks,
        "action": outcome.action,
        "steps": outcome.steps,
        "period": outcome.period,
        "found": found,
        "named": named,
        "text": (first or errors[0]).replace(f"{_ROOT}/", "")[:300],
    }


def _step_of(bundle: pathlib.Path) -> int:
    return int(bundle.name.rpartition("-")[2])


def _replayed(folder: pathlib.Path) -> str:
    """What a replay finds first; else the alarm."""
    step = StepReplay(read_parts(folder))
    for _, finding in FaultSearch(step).findings(step.actions()):
        if finding:
            return finding
    return f"no fault; {step.facts['alarm']}: {step.facts['text']}"


def _is_right(fault: Fault, outcome: Outcome, text: str) -> bool:
    """Whether a replay names action and rank, and for a bad sample operator and sample."""
    names_action = text.startswith(f"{outcome.action} on rank {outcome.rank}:")
    if fault.kind == "reduction":
        return "differ between the ranks" in text
    if fault.kind == "held":
        takes = outcome.action.replace("F", "B")
        return text.startswith(f"{takes} on rank {outcome.rank}: held ")
    if fault.kind == "parameter":
        return f" on rank {outcome.rank}:" in text and "than when the step began" in text
    if fault.kind in ("NaN", "target"):
        return names_action and f"samples   {outcome.sample} of" in text
    return names_action


def clean(launched: Callable[..., Any], ranks: int, steps: int) -> dict[str, Any]:
    """Run steps without a fault, and return the false alarms as a row."""
    with tempfile.TemporaryDirectory() as name:
        outcomes = launched(run, ranks, (None, name, ranks, steps), timeout=_LIMIT + steps)
        bundles = [*pathlib.Path(name).iterdir()]
    errors = [outcome.text for outcome in outcomes if outcome.text]
    return {
        "name": f"clean, {ranks} ranks",
        "kind": "clean",
        "steps": outcomes[0].steps,
        "alarms": len(errors) + len(bundles),
    }
