"""Is what was made of a damaged file right? By other means than those that read it."""

from __future__ import annotations

import contextlib
import csv
import enum
import io
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.torch_csv import read_csv, write_csv
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.plan import Plan

LIMIT = 20.0
"""Seconds: a file of this size is read in milliseconds."""

_COMPUTE = re.compile(r"(\d+)([FIWB])(\d+)", re.ASCII)


class Verdict(enum.Enum):
    """What became of one file."""

    READ = "read"
    REFUSED = "refused"
    WRONG = "wrong"
    UNTYPED = "untyped error"
    HUNG = "hung"


BAD = frozenset({Verdict.WRONG, Verdict.UNTYPED, Verdict.HUNG})


class WrongError(Exception):
    """Something else was read than the file says."""


class _HungError(BaseException):
    """Not an Exception, so that nothing on the way takes it for its own."""


def judge(check: Callable[[Path], None], file: Path) -> tuple[Verdict, str]:
    """The verdict on one file, and what was raised.

    Args:
        check: reads the file, and raises WrongError if it is not read right.
        file: what to read.
    """
    try:
        with _within(LIMIT):
            check(file)
    except AutosplitError as error:
        return Verdict.REFUSED, type(error).__name__
    except WrongError as error:
        return Verdict.WRONG, str(error)
    except _HungError:
        return Verdict.HUNG, f"longer than {LIMIT:g} s"
    except Exception as error:  # that is what is looked for
        return Verdict.UNTYPED, repr(error)
    return Verdict.READ, ""


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def check_csv(form: str, read: Callable[[Path], Schedule] = read_csv) -> Callable[[Path], None]:
    """Reads a schedule, and compares it with the cells of the file."""

    def check(file: Path) -> None:
        schedule = read(file)
        cells = csv.reader(io.StringIO(file.read_bytes().decode(), newline=""))
        rows = [_COMPUTE.findall(re.sub(r"\d+[A-Z_]*_[FB]\d+", "", " ".join(row))) for row in cells]
        expected = [[f"{int(s)}{kind}{int(m)}" for s, kind, m in row] for row in rows]
        _check_schedule(schedule, expected)
        write_csv(schedule, file, form)
        if read_csv(file, name=schedule.name) != schedule:
            raise WrongError("written and read again, it is another schedule")

    return check


def check_plan(
    whole: WholeModel, load: Callable[[Path], Plan] = Plan.load
) -> Callable[[Path], None]:
    """Reads a plan, compares it with the values of the file, and cuts the model by it."""
    known: dict[Any, Any] = {}

    def check(file: Path) -> None:
        plan = load(file)
        said = json.loads(file.read_text())
        _check_schedule(plan.built_schedule(), [row.split() for row in said["actions"]])
        plan.save(file)
        if json.loads(file.read_text()) != said:
            raise WrongError("written again, it is another plan")
        key = plan.cuts, plan.made_for
        known[key] = known.get(key) or _bound(plan, whole)
        if isinstance(known[key], AutosplitError):
            raise known[key]
        if known[key] != plan.stages:
            raise WrongError(f"the model is cut into {known[key]} stages, not {plan.stages}")

    return check


def _bound(plan: Plan, whole: WholeModel) -> int | AutosplitError:
    """How many stages the model is cut into."""
    try:
        return len(plan.bound_to(whole).wiring.inputs)
    except AutosplitError as error:
        return error


def _check_schedule(schedule: Schedule, expected: list[list[str]]) -> None:
    """The same actions in the same order, each needed one once, and none that waits for ever."""
    found = [[str(action) for action in row] for row in schedule.ranks]
    if found != expected:
        raise WrongError("other actions than in the file")
    counts = Counter(action for row in found for action in row)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            forward, inputs, weights, full = (
                counts.pop(f"{stage}{kind}{microbatch}", 0) for kind in "FIWB"
            )
            if forward != 1 or (inputs, weights, full) not in ((1, 1, 0), (0, 0, 1)):
                raise WrongError(f"stage {stage} and microbatch {microbatch}: not F, and B or I, W")
    if counts:
        raise WrongError(f"too much: {next(iter(counts))}")
    started = time.perf_counter()
    simulate(schedule, lambda action: 1.0)
    if time.perf_counter() - started > LIMIT:
        raise WrongError("simulating it takes too long")
