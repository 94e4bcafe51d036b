"""How long moves keep their rank's own thread, as steps have it."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Iterator
from time import perf_counter

import torch

from autosplit.pipeline.simulation.transfer import MoveCosts

_NOTED = 64  # of the last moves


class MoveTimes:
    """Of a rank whose stages are on ``device``; on an accelerator the host's time is not noted,
    for it runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = device.type == "cpu"
        self._leaving: deque[float] = deque(maxlen=_NOTED)
        self._coming: deque[float] = deque(maxlen=_NOTED)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Around what sets off a departure."""
        begun = perf_counter()
        yield
        self._leaving.append(perf_counter() - begun)

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """Around what puts back what came."""
        begun = perf_counter()
        yield
        self._coming.append(perf_counter() - begun)

    def costs(self) -> MoveCosts:
        """The medians; nothing of what has not been seen."""
        if not self._counts:
            return MoveCosts()
        return MoveCosts(
            *(statistics.median(noted or [0.0]) for noted in (self._leaving, self._coming))
        )
