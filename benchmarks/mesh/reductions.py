"""The share of the reduction of replicas' gradients that W hides, over a link that takes time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autosplit import PipelineTrainer
from autosplit.ranks.launch import launch
from autosplit.trainer import gradient_buckets
from autosplit.trainer.gradient_buckets import GradientBuckets

from ..peak import peak_bytes
from ..results import Rows, table
from .link import KnownProducts

WIDTH, ROWS, LAYERS, MICROBATCHES = 256, 64, 20, 4
PRODUCT = 0.004  # seconds of one product of a layer: of F, I or W
DELAYS = (1, 2, 4, 8)  # ms of a bucket's reduction
SCHEDULES = ("1f1b", "zb-h1")
BEHIND, AFTER = "behind W", "after the actions"
GOAL = 90.0  # % hidden

DEEP = 128  # layers
RATIOS = {1: 1.02, 2: 1.1}
"""By number of replicas, the most bytes of gradients over the gradients."""


def measure(steps: int) -> Rows:
    """A row for each schedule, delay and moment at which reductions start."""
    return launch(_rank, 4, (steps,), timeout=900)[0]


class _DelayedReductions:
    """All-reduces of gradients that end ``seconds`` after they begin, one after another.

    Attributes:
        seconds: the time of one.
        exposed: seconds for which the rank waited for them. What Gloo takes, or the other replica
            comes later, is not in it.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.seconds = self.exposed = self._free = self._stopped = 0.0
        self.count = 0
        self._all_reduce = dist.all_reduce

    def reset(self, seconds: float) -> None:
        self.seconds, self.exposed, self.count = seconds, 0.0, 0

    def start(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        work = self._all_reduce(tensor, *args, **options)
        if tensor.dtype is not torch.float32 or tensor.numel() == 1:  # losses, norms
            return work
        self._free = max(self._now(), self._free) + self.seconds
        self.count += 1
        return _DelayedWork(self, work, self._free)

    def wait_for(self, work: Any, end: float) -> None:
        start = time.perf_counter()
        work.wait()
        self._stopped += time.perf_counter() - start
        left = max(0.0, end - self._now())
        self.exposed += left
        time.sleep(left)

    def _now(self) -> float:
        """The time on a clock that stands still while the rank waits for Gloo."""
        return time.perf_counter() - self._stopped


class _DelayedWork:
    """A reduction that is under way."""

    def __init__(self, reductions: _DelayedReductions, work: Any, end: float) -> None:
        self._reductions, self._work, self._end = reductions, work, end

    def wait(self) -> None:
        self._reductions.wait_for(self._work, self._end)


def _rank(steps: int) -> Rows:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    reductions = _DelayedReductions()
    rows: Rows = []
    _products = KnownProducts(PRODUCT / (2 * ROWS * WIDTH**2))
    with (
        mock.patch.object(dist, "all_reduce", reductions.start),
        mock.patch.object(gradient_buckets, "BUCKET_BYTES", 4 * WIDTH**2),
    ):
        for schedule in SCHEDULES:
            with _trainer(mesh, schedule) as behind, _trainer(mesh, schedule) as after:
                _step(behind)
                with mock.patch.object(GradientBuckets, "report_for", return_value=None):
                    _step(after)
                trainers = {BEHIND: behind, AFTER: after}
                for delay in DELAYS:
                    rows += _compare(trainers, schedule, delay, reductions, steps)
    return rows


def _trainer(mesh: DeviceMesh, schedule: str) -> PipelineTrainer:
    return PipelineTrainer(
        lambda _: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        stages=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        mesh=mesh,
    )


def _step(trainer: PipelineTrainer) -> float:
    batch = torch.ones(MICROBATCHES * ROWS, WIDTH)
    dist.barrier()
    start = time.perf_counter()
    trainer.forward_backward((batch, batch))
    seconds = time.perf_counter() - start
    for module in trainer.modules.values():
        module.zero_grad()
    return seconds


def _compare(
    trainers: Mapping[str, PipelineTrainer],
    schedule: str,
    delay: int,
    reductions: _DelayedReductions,
    steps: int,
) -> Rows:
    seconds, hidden = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for step in range(steps):
        for way in [*trainers] if step % 2 else [*trainers][::-1]:
            reductions.reset(delay / 1000)
            seconds[way].append(_step(trainers[way]))
            whole = reductions.count * reductions.seconds
            hidden[way].append(100 * (1 - reductions.exposed / whole))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (dict(hidden), dict(seconds)))
    slowest = {way: [*map(max, *(times[way] for _, times in ranks))] for way in trainers}
    rounds = zip(slowest[BEHIND], slowest[AFTER], strict=True)
    ratio = median(behind / after for behind, after in rounds)
    return [
        {
            "name": f"{schedule}, {delay} ms, {way}",
            "schedule": schedule,
            "delay": delay,
            "way": way,
            "hidden": min(median(shares[way]) for shares, _ in ranks),
            "most": _most_hidden(delay / 1000),
            "seconds": median(slowest[way]),
            "ratio": ratio,
        }
        for way in trainers
    ]


def _most_hidden(delay: float) -> float:
    """The most of a rank's reductions, in percent, that its last W can hide: the k-th bucket is
    complete after k products, and reductions run one after another.
    """
    end = 0.0
    for bucket in range(1, LAYERS + 1):
        end = max(end, bucket * PRODUCT) + delay
    return 100 * (1 - (end - LAYERS * PRODUCT) / (LAYERS * delay))


def render(rows: Rows) -> str:
    """A line a schedule and delay; what misses the goal although W is long enough is bold."""
    cells = []
    by_case = {(row["schedule"], row["delay"], row["way"]): row for row in rows}
    for (schedule, delay, way), row in by_case.items():
        after = by_case.get((schedule, delay, AFTER))
        if way == AFTER or after is None:
            continue
        hidden, most = row["hidden"], row["most"]
        is_short = hidden < GOAL <= most
        ratio = row["ratio"]
        cells.append(
            [
                schedule,
                f"{delay}",
                f"**{hidden:.0f}**" if is_short else f"{hidden:.0f}",
                f"{most:.0f}",
                f"{after['hidden']:.0f}",
                f"{1e3 * row['seconds']:.0f}",
                f"{ratio:.2f}" if ratio <= 1.0 else f"**{ratio:.2f}**",
            ]
        )
    heads = ["schedule", "ms a bucket", "hidden, %", "W can hide", f"{AFTER}, %", "step, ms"]
    return table([*heads, f"/ {AFTER}"], cells)


# --- bytes ----------------------------------------------------------------------------------------


def measure_bytes() -> Rows:
    """A row for each number of replicas."""
    return [launch(_bytes_rank, replicas, timeout=300)[0] for replicas in RATIOS]


def _bytes_rank() -> dict[str, Any]:
    replicas = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, replicas), mesh_dim_names=("pp", "dp_replicate"))
    with PipelineTrainer(
        lambda _: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEEP))),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        stages=1,
        microbatches=2,
        mesh=mesh,
    ) as trainer:
        batch = torch.ones(2, WIDTH)
        trainer.step((batch, batch))
        peak = peak_bytes(lambda: trainer.step((batch, batch)))
    gradients = DEEP * 4 * WIDTH**2
    return {"name": f"{replicas}", "replicas": replicas, "peak": peak, "gradients": gradients}


def render_bytes(rows: Rows) -> str:
    """A line a number of replicas; ratios above what was asked are bold."""
    cells = []
    for row in rows:
        ratio, asked = row["peak"] / row["gradients"], RATIOS[row["replicas"]]
        text = f"{ratio:.3f}"
        cells.append(
            [
                f"{row['replicas']}",
                f"{row['gradients'] / 2**20:.1f}",
                text if ratio <= asked else f"**{text}**",
                f"{asked}",
            ]
        )
    return table(["replicas", "gradients, MiB", "most bytes / gradients", "asked"], cells)
