"""Many damaged files of one kind; one that is read wrong is shrunk to the smallest."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from .judge import BAD, Verdict, judge
from .mutations import damaged
from .subjects import Subject


@dataclass
class Sweep:
    """What came of the files.

    Attributes:
        verdicts: how many got each.
        failure: the smallest file that was not treated right, and how.
    """

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    failure: str = ""


class FailedError(Exception):
    """One file came out wrong; hypothesis shrinks it."""


def sweep(subject: Subject, examples: int, *, seed: int = 0) -> Sweep:
    """Judge so many damaged files, or as many as there are up to the first failure."""
    found = Sweep()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "damaged")

        def each(content: bytes) -> None:
            file.write_bytes(content)
            verdict, detail = judge(subject.check, file)
            if not found.failure:  # while a failure is shrunk, the smaller ones do not count
                found.verdicts[verdict] += 1
            if verdict in BAD:
                found.failure = f"{verdict.value}: {detail}: {content!r}"
                raise FailedError(found.failure)

        given = hypothesis.given(damaged(subject.sound, is_json=subject.is_json))
        test = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )(given(each))
        with contextlib.suppress(FailedError):
            hypothesis.seed(seed)(test)()
    return found
