"""Examine many generated modules; a failing one is shrunk to the smallest that fails."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator

import hypothesis
from hypothesis import HealthCheck, Phase, settings

import autosplit

from ..examine import Finding, Splitter, Verdict, examine
from .plan import Plan
from .strategies import plans

BAD = frozenset({Verdict.WRONG, Verdict.CRASHED})
CHUNK = 50  # examples of one hypothesis run; a failure ends the run


@dataclasses.dataclass
class Sweep:
    """What came of a sweep.

    Attributes:
        verdicts: how many examples got each.
        refusals: reason -> how many.
        failures: the shrunk plan and what is wrong with it.
        in_parts: how many no single graph holds.
    """

    verdicts: Counter[Verdict] = dataclasses.field(default_factory=Counter)
    refusals: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    in_parts: int = 0

    @property
    def examples(self) -> int:
        return sum(self.verdicts.values())


class FailedError(Exception):
    """A generated module came out wrong; hypothesis shrinks the plan that made it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.verdict.value}: {finding.detail}\n{finding.name}")
        self.finding = finding


def sweep(
    examples: int,
    *,
    seed: int = 0,
    seconds: float = float("inf"),
    splitter: Splitter = autosplit.split,
    bad: frozenset[Verdict] = BAD,
) -> Sweep:
    """Examine ``examples`` plans or as many as fit into ``seconds``."""
    found = Sweep()
    end = time.monotonic() + seconds
    for number in _seeds(seed):
        left = examples - found.examples
        if left <= 0 or time.monotonic() > end:
            return found
        try:
            _run(found, number, min(left, CHUNK), splitter, bad)
        except FailedError as failed:
            found.failures[failed.finding.name] = (
                f"{failed.finding.verdict.value}: {failed.finding.detail}"
            )
    return found


def _seeds(first: int) -> Iterator[int]:
    number = first
    while True:
        yield number
        number += 1


def _run(
    found: Sweep, seed: int, examples: int, splitter: Splitter, bad: frozenset[Verdict]
) -> None:
    failed = False

    def each(plan: Plan) -> None:
        nonlocal failed
        finding = examine(plan.subject(), splitter)
        if not failed:  # while a failure is shrunk, the smaller ones do not count
            found.verdicts[finding.verdict] += 1
            found.in_parts += finding.in_parts
            if finding.verdict is Verdict.REFUSED:
                found.refusals[finding.detail] += 1
        if finding.verdict in bad:
            failed = True
            raise FailedError(finding)

    test = hypothesis.given(plans())(each)
    test = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )(test)
    hypothesis.seed(seed)(test)()
