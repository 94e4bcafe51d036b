"""What a comparison runs, and what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import PIPELINE, REPLICATE
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.timeline import Timeline

# Processes and threads of one machine; seconds of eleven days; what a table can hold.
_RANGES: dict[str, tuple[float, float]] = {
    "stages": (1, 10_000),
    "ranks": (1, 256),
    "steps": (1, 1_000_000),
    "warmup": (0, 1_000_000),
    "threads": (1, 1024),
    "learning_rate": (0.0, 1e6),
    "timeout": (0.001, 1e6),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to compare. Picklable: every rank gets a copy.

    Attributes:
        factory: ``MODULE:FACTORY`` that returns a Workload.
        overrides: keyword settings for the factory.
        stages: number of pipeline stages.
        ranks: number of processes; fewer along a pipeline than stages puts several stages in one.
        schedules: schedule names; each is compared at each of ``microbatches``.
        microbatches: microbatches in a step.
        weights: where the split schedule puts weight gradients; None where suits it.
        steps: timed steps of each of the two, alternating.
        warmup: steps of each before the timed ones.
        learning_rate: of AdamW.
        threads: torch threads of each process.
        timeout: seconds to wait for another rank.
        backend: how the stages' graphs are run, see ``autosplit.split``.
        profiling: seconds of measuring what a whole model's blocks cost, to cut it by.
        dump: folder in which every rank dumps the graphs of its stages, or None.
        mesh: dimensions of the mesh and their sizes; empty: all ranks are one pipeline.

    Raises:
        PipelineError: a number out of range, nothing to compare, or a dimension that trainers
            do not know.
    """

    factory: str
    overrides: Mapping[str, str]
    stages: int
    ranks: int
    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    weights: str | None
    steps: int
    warmup: int
    learning_rate: float
    threads: int
    timeout: float
    backend: str = "eager"
    profiling: float = 10.0
    dump: str | None = None
    mesh: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value < least:
                raise PipelineError(f"{name} must be at least {least}, got {value}")
            if not value <= most:  # NaN is neither
                raise PipelineError(f"{name} must be at most {most:,}, got {value:,}")
        for name in ("schedules", "microbatches"):
            if not getattr(self, name):
                raise PipelineError(f"{name} names nothing to compare: give one or more")
        for name, _ in self.mesh:
            if name not in (PIPELINE, REPLICATE):
                raise PipelineError(
                    f"a comparison has no mesh dimension {name!r}; it takes {PIPELINE!r} and "
                    f"{REPLICATE!r}"
                )

    @property
    def replicas(self) -> int:
        """How many pipelines train the model."""
        return dict(self.mesh).get(REPLICATE, 1)

    @property
    def along_pipeline(self) -> int:
        """How many ranks a pipeline has."""
        return dict(self.mesh).get(PIPELINE, 1) if self.mesh else self.ranks

    @property
    def cases(self) -> list[tuple[str, int]]:
        """Schedules and numbers of microbatches, in the order in which they are compared."""
        return [(name, count) for name in self.schedules for count in self.microbatches]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        schedule: schedule name.
        split: whether input and weight gradients ran apart.
        stages: number of stages.
        microbatches: microbatches in a step.
        median_s: median seconds of a step: forward, backward, optimizer, until all ranks are done.
        spread_s: interquartile range of the same.
        tokens_per_s: tokens (samples where there are none) in a step by ``median_s``.
        speedup: median over the alternating pairs of fused time / this row's time; 1 for fused.
        ideal_speedup: the same from simulated steps with the durations measured in this run.
        bubble: idle share of the ranks' time between first start and last end, measured.
        ideal_bubble: the same, simulated with the durations measured in this run.
        peak_bytes: per rank, the most bytes of tensors at any time of a step.
        max_grad_diff: largest difference from gradients of single-process autograd.
        first_loss: mean loss of the first step, of replicas the first one's.
        last_loss: mean loss of the last step, likewise.
        durations_s: action kind -> median seconds, by stage.
        reduction_hidden: median share of the time of reducing gradients over replicas that does
            not lengthen the step; None with one pipeline.
    """

    schedule: str
    split: bool
    stages: int
    microbatches: int
    median_s: float
    spread_s: float
    tokens_per_s: float
    speedup: float
    ideal_speedup: float
    bubble: float
    ideal_bubble: float
    peak_bytes: list[int]
    max_grad_diff: float
    first_loss: float
    last_loss: float
    durations_s: dict[str, list[float]]
    reduction_hidden: float | None = None

    @property
    def title(self) -> str:
        return f"{self.schedule} {'split' if self.split else 'fused'}, M={self.microbatches}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Rows, and for each the step whose time is nearest to the median, and the ideal one.

    The ideal is simulated from the row's median durations: no transfer takes time, nothing waits
    for anything but its input. ``memory`` is, for each row, what each stage keeps of a microbatch,
    in bytes.
    """

    rows: list[Row]
    timelines: list[Timeline]
    ideals: list[Timeline]
    memory: list[list[StageMemory]]
