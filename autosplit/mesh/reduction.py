"""Gradients reduced over ranks: which together, in buckets, and each bucket under way as soon as
its gradients are there.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

from torch import Tensor

CAP = 25 * 2**20
"""Bytes of a bucket, as DistributedDataParallel has them."""


def fill_buckets(
    gradients: Sequence[tuple[Hashable, int]], cap: int = CAP
) -> tuple[tuple[int, ...], ...]:
    """Put gradients into buckets, in the order in which these are complete.

    Args:
        gradients: kind and bytes of each, in the order in which they are complete. Only those of
            one kind share a bucket.
        cap: bytes of a bucket, but for a gradient that has more, which has one of its own.

    Returns:
        Per bucket the places of its gradients, in their order.
    """
    buckets: list[list[int]] = []
    open_at: dict[Hashable, tuple[int, int]] = {}  # kind -> its last bucket, and the bytes of that
    for place, (kind, size) in enumerate(gradients):
        at, filled = open_at.get(kind, (-1, 0))
        if at < 0 or filled + size > cap:
            at, filled = len(buckets), 0
            buckets.append([])
        buckets[at].append(place)
        open_at[kind] = at, filled + size
    return tuple(map(tuple, sorted(buckets, key=lambda bucket: bucket[-1])))


class GradientReduction(ABC):
    """One reduction over ranks, of the gradients of some parameters.

    Args:
        stage: that holds them; None where several do.

    Attributes:
        stage: see above.
        timed: whether to note when it starts and ends.
        times: seconds of ``time.perf_counter``, of the last one that was timed.
    """

    def __init__(self, stage: int | None) -> None:
        self.stage = stage
        self.timed = False
        self.times: tuple[float, float] | None = None
        self._before: list[Tensor | None] = []

    @property
    @abstractmethod
    def reduced(self) -> Sequence[Tensor]:
        """The parameters."""

    def begin(self) -> None:
        """Put the gradients that are there aside: those to come are reduced."""
        self._before = [each.grad for each in self.reduced]
        for each in self.reduced:
            each.grad = None

    def give_back(self) -> None:
        """Put them back, in place of what has come since."""
        for each, gradient in zip(self.reduced, self._before, strict=True):
            each.grad = gradient

    @abstractmethod
    def start(self) -> None:
        """Start to reduce the gradients that have come, which are complete; does not wait."""

    @abstractmethod
    def finish(self, settled: Callable[[], None]) -> None:
        """Wait, and add the result to what was put aside.

        Args:
            settled: waits until the device has done what it was given.

        Raises:
            LostPeerError: another rank did not take part.
        """


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
