"""Bytes alive after each action, and the most inside it, as the allocator saw them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator

from autosplit.torch_internals.allocations import allocations_on

from .contenders import ACTIONS, Contender, microbatch
from .models import Subject
from .reference import distinct_bytes


@dataclasses.dataclass(frozen=True)
class Level:
    """Bytes above what was alive before the microbatch.

    Attributes:
        held: at the end of an action, the parameters' gradients so far left out.
        peak: the most inside the action, everything counted.
    """

    held: int
    peak: int


def levels(contender: Contender, subject: Subject) -> dict[str, Level]:
    """One microbatch, action by action; run one before, so that caches are filled."""
    gc.collect()
    gradients: dict[str, int] = {}
    with allocations_on(subject.x.device) as allocations:

        @contextlib.contextmanager
        def counted(action: str) -> Iterator[None]:
            yield
            allocations.mark()
            gradients[action] = distinct_bytes(contender.gradients().values())

        allocations.mark()
        microbatch(contender, subject, counted)
    found = zip(ACTIONS, allocations.stretches()[:-1], strict=True)
    contender.clear()
    return {action: Level(each.end - gradients[action], each.highest) for action, each in found}
