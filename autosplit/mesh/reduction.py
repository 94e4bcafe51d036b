"""Reductions of gradients over ranks: each under way as soon as its gradients are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Protocol


class GradientReduction(Protocol):
    """One reduction over ranks, of the gradients of some parameters."""

    def begin(self) -> None:
        """Put the gradients that are there aside: those to come are reduced."""
        ...

    def give_back(self) -> None:
        """Put them back, in place of what has come since."""
        ...

    def start(self) -> None:
        """Start to reduce the gradients that have come, which are complete; does not wait."""
        ...

    def finish(self, settled: Callable[[], None]) -> None:
        """Wait, and add the result to what was put aside.

        Args:
            settled: waits until the device has done what it was given.

        Raises:
            LostPeerError: another rank did not take part.
        """
        ...


class ReductionQueue:
    """Reductions in one order on all ranks that take part in them.

    What is complete too early for that order waits for those before it.

    Args:
        reductions: each with what it waits for; without anything, for the end.
        settled: see ``GradientReduction.finish``.

    Attributes:
        open: whether this is inside ``reducing``.
    """

    def __init__(
        self,
        reductions: Sequence[tuple[GradientReduction, Collection[Hashable]]],
        settled: Callable[[], None],
    ) -> None:
        self._reductions = [reduction for reduction, _ in reductions]
        self._needs = [frozenset(needs) for _, needs in reductions]
        self._settled = settled
        self._ready: set[Hashable] = set()
        self._started = 0
        self.open = False

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Reduce the gradients that come inside.

        What was there before stays, once, so that steps can accumulate. After an error in the
        block, only that is there.

        Raises:
            LostPeerError: another rank did not take part.
        """
        self._started, self._ready, self.open = 0, set(), True
        for reduction in self._reductions:
            reduction.begin()
        try:
            yield
        except BaseException:
            for reduction in self._reductions:
                reduction.give_back()
            raise
        finally:
            self.open = False
        for reduction in self._reductions[self._started :]:
            reduction.start()
        for reduction in self._reductions:
            reduction.finish(self._settled)

    def ready(self, what: Hashable) -> None:
        """Start what waited for ``what`` last, and may start in its order."""
        self._ready.add(what)
        while self._started < len(self._reductions):
            needs = self._needs[self._started]
            if not needs or not needs <= self._ready:
                break
            self._reductions[self._started].start()
            self._started += 1
