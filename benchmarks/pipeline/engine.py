"""What the engine costs by itself: time for each action, and memory over many steps."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import resource
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline import StageOptions
from autosplit.pipeline.builders.build import build
from autosplit.ranks.launch import launch
from autosplit.trainer.trainer import PipelineTrainer

from ..results import Rows, Target, mark, table, verdicts

TARGET_US = 30.0
REPORTS = Target("metrics() and the bar, of a step", at_most=0.01, style=".2%")
_MICROBATCHES = 64
_STEPS = 30
_REPORTED = 300  # steps after each of which a report is made


@dataclasses.dataclass(frozen=True)
class Idle:
    """A stage that does nothing: its actions cost what the engine costs."""

    output: Tensor
    gradient: Tensor

    @property
    def output_specs(self) -> list[tuple[torch.Size, torch.dtype, bool]]:
        return [(self.output.shape, self.output.dtype, True)]

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        inputs.clear()
        return [self.output]

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        output_grads.clear()
        return [self.gradient, None]

    backward = backward_input

    def backward_weight(self, microbatch: int) -> None:
        pass

    def publish(self) -> None:
        pass


def measure(soak: int) -> Rows:
    """Overhead on one rank and on two, of reports, and the soak."""
    alone = launch(_overhead, 1, (4, 1), timeout=120)[0]
    paired = max(launch(_overhead, 2, (4, 2), timeout=120))
    before, after, seconds = launch(_soak, 2, (soak,), timeout=1800)[0]
    return [
        {"name": "an action, all stages on one rank", "us": alone},
        {"name": "an action, messages between two ranks", "us": paired},
        {"name": REPORTS.name, "share": launch(_reports, 1, timeout=120)[0]},
        {"name": "soak", "steps": soak, "before": before, "after": after, "seconds": seconds},
    ]


def render(rows: Rows) -> str:
    """Microseconds by case, and a sentence on the soak."""
    cells = [
        [row["name"], mark(f"{row['us']:.1f}", row["us"] <= TARGET_US)]
        for row in rows
        if "us" in row
    ]
    soak = next(row for row in rows if row["name"] == "soak")
    shares = {row["name"]: row["share"] for row in rows if "share" in row}
    reports = (
        f"{verdicts([(REPORTS, shares)])} A step has 24 actions on one rank.\n" if shares else ""
    )
    grown = (soak["after"] - soak["before"]) / 2**20
    return f"""\
{table(["", "microseconds"], cells)}

Target: {TARGET_US:.0f} us. Time is that of the rank's thread, without waits.
{reports}
Soak: {soak["steps"]} steps of a small model on two ranks, {soak["seconds"]:.0f} s; resident memory
of rank 0 grew by {grown:.1f} MiB between a tenth of the steps and the end."""


def _overhead(stages: int, ranks: int) -> float:
    """Microseconds of this thread for an action: the median step over its number of actions."""
    schedule = build("1f1b", stages, _MICROBATCHES, ranks=ranks)
    batch = (torch.zeros(_MICROBATCHES, 1), torch.zeros(_MICROBATCHES, 1))

    def factory(module: nn.Module, args: list[Tensor], *, index: int) -> Idle:
        shape = [] if index == stages - 1 else [1]
        return Idle(torch.zeros(shape), torch.zeros(1))

    trainer = PipelineTrainer(
        [nn.Identity() for _ in range(stages)],
        lambda output, target: output,
        torch.optim.SGD,
        microbatches=_MICROBATCHES,
        schedule=schedule,
        ranks=ranks,
        stage_options=StageOptions(stage_factory=factory),
    )
    seconds = []
    with trainer:
        for _ in range(_STEPS):
            if ranks > 1:
                dist.barrier()
            start = time.thread_time()
            trainer.forward_backward(batch)
            seconds.append(time.thread_time() - start)
    actions = max(len(row) for row in schedule.ranks)
    return 1e6 * statistics.median(seconds) / actions


def _reports() -> float:
    """Thread time of ``metrics()`` and ``progress()`` after each step, over that of the step."""
    stages = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
    batch = torch.ones(32, 16), torch.zeros(32, 16)
    seconds: dict[str, list[float]] = {"step": [], "reports": []}
    with PipelineTrainer(
        stages, nn.functional.mse_loss, torch.optim.SGD, microbatches=4, ranks=1
    ) as trainer:
        batches = trainer.progress(itertools.repeat(batch, _REPORTED))
        for _ in range(_REPORTED):
            start = time.thread_time()
            following = next(batches)
            before = time.thread_time()
            trainer.step(following)
            after = time.thread_time()
            trainer.metrics()
            seconds["step"].append(after - before)
            seconds["reports"].append(time.thread_time() - after + before - start)
    return statistics.median(seconds["reports"]) / statistics.median(seconds["step"])


def _soak(steps: int) -> tuple[int, int, float]:
    """Resident bytes after a tenth of the steps and after all, and the seconds it took."""
    width, count = 64, 4
    generator = torch.Generator().manual_seed(0)
    trainer = PipelineTrainer(
        lambda index: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)),
        nn.functional.mse_loss,
        torch.optim.AdamW,
        stages=2,
        microbatches=count,
    )
    start, before = time.perf_counter(), 0
    with trainer:
        for step in range(steps):
            batch = torch.randn(4 * count, width, generator=generator)
            trainer.step((batch, batch))
            if step == steps // 10:
                before = _resident()
    return before, _resident(), time.perf_counter() - start


def _resident() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
