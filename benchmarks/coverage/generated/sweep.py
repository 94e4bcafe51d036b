"""Examine many generated modules; a failing one is shrunk to the smallest that fails."""

from __future__ import annotations

import dataclasses
from collections import Counter

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from ..examine import Finding, Splitter, Verdict, examine, split_for_rounds
from .plan import Plan
from .strategies import plans

BAD = frozenset({Verdict.WRONG, Verdict.CRASHED})


@dataclasses.dataclass
class Sweep:
    """What came of one run of hypothesis, which a failure ends.

    Attributes:
        verdicts: how many examples got each.
        refusals: reason -> how many.
        failures: the shrunk plan, if any, and what is wrong with it.
        in_parts: how many no single graph holds.
    """

    verdicts: Counter[Verdict] = dataclasses.field(default_factory=Counter)
    refusals: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    in_parts: int = 0

    def add(self, finding: Finding) -> None:
        self.verdicts[finding.verdict] += 1
        self.in_parts += finding.in_parts
        if finding.verdict is Verdict.REFUSED:
            self.refusals[finding.detail] += 1


class FailedError(Exception):
    """A generated module came out wrong; hypothesis shrinks the plan that made it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.verdict.value}: {finding.detail}\n{finding.name}")
        self.finding = finding


def sweep(
    examples: int,
    *,
    seed: int = 0,
    splitter: Splitter = split_for_rounds,
    bad: frozenset[Verdict] = BAD,
) -> Sweep:
    """Examine ``examples`` plans, or as many as there are up to the first failure."""
    found = Sweep()

    def each(plan: Plan) -> None:
        finding = examine(plan.subject(), splitter)
        if not found.failures:  # while a failure is shrunk, the smaller ones do not count
            found.add(finding)
        if finding.verdict in bad:
            found.failures = {finding.name: f"{finding.verdict.value}: {finding.detail}"}
            raise FailedError(finding)

    test = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )(hypothesis.given(plans())(each))
    try:
        hypothesis.seed(seed)(test)()
    except FailedError as failed:
        finding = failed.finding
        found.failures = {finding.name: f"{finding.verdict.value}: {finding.detail}"}
    return found
