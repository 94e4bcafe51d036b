"""Compare every architecture on ranks with plain autograd in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autosplit.errors import PipelineError

from ...kept_ranks import HungError, KeptRanks
from ..examine import Verdict
from ..judge import differences, out_of_tolerance
from ..observe import Observed
from ..rows import HUNG
from .lesson import Lesson, subjects
from .on_rank import Trained, train_on_rank
from .reference import taught

_CALLS = 20  # architectures for the same processes


def measure(names: Sequence[str], stages: int, limit: float) -> Iterator[dict[str, Any]]:
    """A row for each architecture.

    Args:
        names: of ``subjects()``.
        stages: on as many ranks.
        limit: seconds for one architecture.
    """
    ranks = KeptRanks()
    try:
        for at, name in enumerate(names):
            if at % _CALLS == 0:
                ranks.end()
            start = time.perf_counter()
            verdict, detail, cut = _of(name, stages, limit, ranks)
            found = {"verdict": verdict, "detail": detail, "cut": cut}
            seconds = round(time.perf_counter() - start, 1)
            kept = {key: value for key, value in found.items() if value}
            yield {"name": name, "group": subjects()[name][0], **kept, "seconds": seconds}
    finally:
        ranks.end()


def _of(name: str, stages: int, limit: float, ranks: KeptRanks) -> tuple[str, str, str]:
    """Verdict, what differs or why there is nothing, and where the model was cut."""
    try:
        every = ranks(train_on_rank, stages, (name, stages, limit), timeout=limit)
    except HungError as error:
        return HUNG, str(error), ""
    except PipelineError as error:
        lines = str(error).splitlines()
        return Verdict.CRASHED.value, f"{lines[0]} ({lines[-1]})"[:500], ""
    # One that lost its peer says less than the peer.
    failed = [each for each in every if each.verdict is not None]
    if failed:
        worst = min(failed, key=lambda each: each.verdict is not Verdict.CRASHED)
        return (worst.verdict or Verdict.CRASHED).value, worst.detail, ""
    return *compared(Lesson(name), every), every[0].cut


def compared(lesson: Lesson, every: Sequence[Trained]) -> tuple[str, str]:
    """Verdict on what the ranks have seen, and what differs."""
    draws = every[0].draws
    mine = _united([each.seen for each in every])
    try:
        theirs = taught(lesson, draws)
    except Exception as error:
        return Verdict.NO_BACKWARD.value, f"{type(error).__name__}: {error}"[:300]
    differing = differences(mine, theirs)
    if not differing:
        return Verdict.EQUAL.value, ""
    exact = _tried(lambda: taught(lesson, draws, torch.float64))
    wrong = out_of_tolerance(differing, mine, theirs, exact)
    verdict = Verdict.WRONG if wrong else Verdict.CLOSE
    lines = wrong or differing
    return verdict.value, "; ".join([f"{len(lines)} of {len(theirs)} differ", *lines[:4]])


def _united(every: Sequence[Observed]) -> Observed:
    """What all ranks have seen; where they have seen different things under one name, that."""
    seen: Observed = {}
    for rank, own in enumerate(every):
        before = {name: seen[name] for name in own if name in seen}
        other = differences({name: own[name] for name in before}, before)
        seen = own | seen | dict.fromkeys(other, f"rank {rank} has another than those before")
    return seen


def _tried(make: Callable[[], Observed]) -> Observed | None:
    try:
        return make()
    except Exception:
        return None
