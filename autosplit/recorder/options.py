"""The user's options of the flight recorder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autosplit.errors import PipelineError
from autosplit.text.figures import nearest, parse_size

ALARMS = ("nonfinite", "error", "memory", "replicas", "signal")
"""Names of the alarms that the recorder raises by itself."""

Predicate: TypeAlias = "Callable[[Mapping[str, float]], bool]"
"""Called with the metrics of a step; True raises the alarm."""


@dataclass(frozen=True)
class Recorder:
    """Options of the flight recorder: the memory that it may use, its alarms and its files.

    After an alarm on one rank, every rank writes its part of the same step. Without an alarm, only
    ``log`` is written.

    Attributes:
        folder: where bundles are written; all ranks must see it.
        keep: the most bytes of activations and gradients between stages that a rank keeps until
            the step ends, or a text such as ``"1GiB"``. The batch is kept by reference, and does
            not count. A replay computes tensors that were not kept.
        alarms: names in ``ALARMS``, and functions from a step's ``metrics()`` to whether the step
            shall be written. ``"nonfinite"``: a loss, a gradient, or an output that gets a gradient
            is infinite or NaN. ``"error"``: a step raises any error, such as ``AnomalyError``.
            ``"memory"``: a tensor that a stage holds has changed, see ``digests``.
            ``"replicas"``: parameters or gradients differ where their bits must be equal.
            ``"signal"``: the process gets SIGUSR1. Each alarm except the signal causes one bundle a
            run.
        digests: the tensors that get digests. ``"boundaries"``: tensors that stages send to each
            other. ``"all"``: also tensors that a stage holds between F, I and W, once after the
            action that leaves them and once before the action that takes them. Two different
            digests show that a bit flipped in memory.
        steps: the number of steps whose digests are kept.
        log: a folder for one file a rank, with a line of JSON a step; None: no file.
        tensors: whether bundles have tensors and programs. Without them, a bundle cannot be run
            again, and holds shapes and digests only.

    Raises:
        PipelineError: an unknown alarm, or a wrong size or count.
    """

    folder: str | os.PathLike[str] = "flight-recorder"
    keep: int | str = "1GiB"
    alarms: Sequence[str | Predicate] = ALARMS
    digests: Literal["boundaries", "all"] = "boundaries"
    steps: int = 16
    log: str | os.PathLike[str] | None = None
    tensors: bool = True

    def __post_init__(self) -> None:
        parse_size(self.keep, "keep", PipelineError)
        if self.digests not in ("boundaries", "all"):
            raise PipelineError(
                f"Recorder: digests must be 'boundaries' or 'all'; got {self.digests!r}"
            )
        if self.steps < 1:
            raise PipelineError(f"Recorder: steps must be at least 1; got {self.steps}")
        for alarm in self.alarms:
            if not callable(alarm) and alarm not in ALARMS:
                raise PipelineError(
                    f"Recorder: unknown alarm {alarm!r}; expected a function of metrics(), or one "
                    f"of {', '.join(map(repr, ALARMS))}{nearest(str(alarm), ALARMS)}"
                )

    @property
    def kept_bytes(self) -> int:
        """``keep`` in bytes."""
        return parse_size(self.keep, "keep", PipelineError)

    @property
    def names(self) -> list[str]:
        """The names of the alarms; functions have the name ``"metrics"``."""
        return ["metrics" if callable(alarm) else alarm for alarm in self.alarms]
