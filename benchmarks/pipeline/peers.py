"""Ours beside torch.distributed.pipelining: the same model, ranks, batches, in one run."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autosplit.compare.memory import peak_bytes
from autosplit.pipeline.processes.launch import launch
from autosplit.pipeline.training.trainer import PipelineTrainer
from autosplit.workload import Workload, load_workload

from ..results import Rows, table

RANKS = 2
COUNTS = (2, 4, 8)
BACKENDS = ("eager", "inductor")
FACTORY = "examples.models:llama"
OVERRIDES = {"seq": "128"}  # actions of 20 ms and more
TARGET = {2: 1.05, 4: 1.05, 8: 1.0}  # our best over their best
TIMEOUT = 120.0

_WARM_UP = 2  # steps
_WARM_UP_AUTO = 4  # "auto" measures three before it has its schedule


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to run a step.

    Attributes:
        name: as in the table.
        ours: by autosplit, or by torch.
        schedule: its name with autosplit, or the class with torch.
        chunks: stages on each rank.
        v_shaped: rank r holds stages r and 2P - 1 - r, rather than every P-th one.
        split_backward: whether I and W are separate actions.
        match: of one by torch, the name of the same schedule by autosplit.
        accumulation: how autosplit adds up weight gradients.
        compiled: whether it also runs compiled, which takes minutes to build.
    """

    name: str
    ours: bool
    schedule: Any
    chunks: int = 1
    v_shaped: bool = False
    split_backward: bool = True
    match: str = ""
    accumulation: str = "exact"
    compiled: bool = True


OURS = (
    Contender("1f1b, fused", True, "1f1b", split_backward=False),
    Contender("1f1b", True, "1f1b"),
    Contender("gpipe, fused", True, "gpipe", split_backward=False),
    Contender("gpipe", True, "gpipe", compiled=False),
    Contender("interleaved, fused", True, "interleaved", 2, split_backward=False),
    Contender("interleaved", True, "interleaved", 2),
    Contender("interleaved, 4 stages a rank", True, "interleaved", 4),
    Contender(
        "interleaved, 4 stages a rank, fused sums",
        True,
        "interleaved",
        4,
        accumulation="fused",
        compiled=False,
    ),
    Contender("zb-v", True, "zb-v", 2, v_shaped=True),
    Contender("dualpipe-v", True, "dualpipe-v", 2, v_shaped=True, compiled=False),
    Contender("auto, 4 stages a rank", True, "auto", 4, compiled=False),
    Contender(
        "auto, 4 stages a rank, fused sums",
        True,
        "auto",
        4,
        accumulation="fused",
        compiled=False,
    ),
)
_ZERO_BUBBLE = Contender(
    "InterleavedZeroBubble", False, ScheduleInterleavedZeroBubble, 2, match="interleaved"
)
THEIRS = (
    Contender("1F1B", False, Schedule1F1B, split_backward=False, match="1f1b, fused"),
    Contender("GPipe", False, ScheduleGPipe, split_backward=False, match="gpipe, fused"),
    Contender(
        "Interleaved1F1B",
        False,
        ScheduleInterleaved1F1B,
        2,
        split_backward=False,
        match="interleaved, fused",
    ),
    _ZERO_BUBBLE,
    dataclasses.replace(
        _ZERO_BUBBLE,
        name="InterleavedZeroBubble, 4 stages a rank",
        chunks=4,
        match="interleaved, 4 stages a rank",
        compiled=False,
    ),
    Contender("ZBVZeroBubble", False, ScheduleZBVZeroBubble, 2, v_shaped=True, match="zb-v"),
    Contender("DualPipeV", False, ScheduleDualPipeV, 2, v_shaped=True, match="dualpipe-v"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Seconds of forward and backward of a step, and the largest peak of a rank in bytes."""

    name: str
    ours: bool
    microbatches: int
    seconds: float
    spread: float
    peak: int
    error: str = ""
    match: str = ""


def measure_all(steps: int, backends: Sequence[str], counts: Sequence[int]) -> Rows:
    """Each of the backends at each M."""
    rows: Rows = []
    for backend in backends:
        chosen = [each for each in (*OURS, *THEIRS) if each.compiled or backend == "eager"]
        for row in measure(FACTORY, counts, steps, backend, contenders=chosen):
            whose = "ours" if row.ours else "torch"
            name = f"{backend}, M={row.microbatches}: {whose} {row.name}"
            rows.append({**dataclasses.asdict(row), "name": name, "schedule": row.name})
    return rows


def render(rows: Rows) -> str:
    """A table for each backend and M, ours above torch's, and who is ahead."""
    settings = list(dict.fromkeys(row["name"].partition(": ")[0] for row in rows))
    return "\n\n".join(_setting(each, rows) for each in settings)


def _setting(setting: str, rows: Rows) -> str:
    mine = [row for row in rows if row["name"].startswith(f"{setting}: ")]
    cells = [
        [
            "autosplit" if row["ours"] else "torch",
            row["schedule"],
            f"{1e3 * row['seconds']:.0f}" if not row["error"] else "fails",
            f"{1e3 * row['spread']:.0f}" if not row["error"] else "",
            f"{row['peak'] / 2**20:.0f}" if not row["error"] else "",
            _over_match(row, mine),
        ]
        for row in mine
    ]
    text = table(
        ["by", "schedule", "step ms", "spread ms", "peak MiB", "over ours of the same schedule"],
        cells,
    )
    errors = [f"{row['schedule']}: {row['error']}" for row in mine if row["error"]]
    if errors:
        text += "\n\n" + "\n".join(f"- {each}" for each in errors)
    best = {
        ours: min((r["seconds"] for r in mine if r["ours"] is ours and not r["error"]), default=0.0)
        for ours in (True, False)
    }
    if not all(best.values()):
        return f"### {setting}\n\n{text}"
    ratio, target = best[False] / best[True], TARGET[mine[0]["microbatches"]]
    figure = f"{ratio:.3f}x" if ratio >= target else f"**{ratio:.3f}x**"
    return f"### {setting}\n\n{text}\n\nTheir best over ours: {figure} (target {target:.2f}x)."


def _over_match(row: dict[str, Any], mine: Rows) -> str:
    """Torch's time over ours of the same schedule."""
    ours = [each for each in mine if each["ours"] and each["schedule"] == row["match"]]
    if row["error"] or not ours or ours[0]["error"]:
        return ""
    ratio = row["seconds"] / ours[0]["seconds"]
    return f"{ratio:.3f}x" if ratio >= 1.0 else f"**{ratio:.3f}x**"


def measure(
    factory: str,
    microbatches: Sequence[int],
    steps: int,
    backend: str = "eager",
    overrides: Mapping[str, object] = OVERRIDES,
    contenders: Sequence[Contender] = (*OURS, *THEIRS),
) -> list[Row]:
    """Every contender at every M, alternating step by step; one launch."""
    args = (factory, overrides, tuple(contenders), tuple(microbatches), steps, backend)
    return launch(_on_rank, RANKS, args, timeout=1800.0)[0]


def _on_rank(
    factory: str,
    overrides: Mapping[str, object],
    contenders: Sequence[Contender],
    microbatches: Sequence[int],
    steps: int,
    backend: str,
) -> list[Row]:
    warnings.filterwarnings("ignore")
    workload = load_workload(factory, overrides)
    return [
        row
        for count in microbatches
        for row in _compare(workload, contenders, count, steps, backend)
    ]


def _compare(
    workload: Workload, contenders: Sequence[Contender], count: int, steps: int, backend: str
) -> list[Row]:
    batch = workload.batch_fn(0, count * workload.microbatch_size)
    calls: dict[Contender, Callable[[], Any]] = {}
    errors: dict[Contender, str] = {}
    trainers: list[PipelineTrainer] = []
    for contender in contenders:
        make = functools.partial(_ours, trainers) if contender.ours else _theirs
        try:
            call = make(contender, workload, count, backend, batch)
            for _ in range(_WARM_UP_AUTO if contender.schedule == "auto" else _WARM_UP):
                call()
        except Exception as error:
            errors[contender] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            call = None
        failed = _gather(contender in errors)
        if call is not None and not any(failed):
            calls[contender] = call
    seconds: dict[Contender, list[float]] = {contender: [] for contender in calls}
    for _ in range(steps):
        for contender, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            seconds[contender].append(time.perf_counter() - start)
    device = torch.device("cpu")
    peaks = {each: max(_gather(peak_bytes(call, [], device))) for each, call in calls.items()}
    for trainer in trainers:
        trainer.close()
    return [
        Row(
            contender.name,
            contender.ours,
            count,
            statistics.median(seconds.get(contender, [float("nan")])),
            _spread(seconds.get(contender, [])),
            peaks.get(contender, 0),
            errors.get(contender, ""),
            contender.match,
        )
        for contender in contenders
    ]


def _ours(
    trainers: list[PipelineTrainer],
    contender: Contender,
    workload: Workload,
    count: int,
    backend: str,
    batch: tuple[Any, Any],
) -> Callable[[], Any]:
    stages = RANKS * contender.chunks
    trainer = PipelineTrainer(
        lambda index: workload.stage_fn(index, stages),
        workload.loss_fn,
        torch.optim.SGD,
        stages=stages,
        microbatches=count,
        schedule=contender.schedule,
        split_backward=contender.split_backward,
        backend=backend,
        accumulation=contender.accumulation,
        timeout=TIMEOUT,
    )
    trainers.append(trainer)

    def call() -> None:
        trainer.forward_backward(batch)
        _forget(trainer.modules.values())

    return call


def _theirs(
    contender: Contender,
    workload: Workload,
    count: int,
    backend: str,
    batch: tuple[Any, Any],
) -> Callable[[], Any]:
    rank, total = dist.get_rank(), RANKS * contender.chunks
    held = [rank + chunk * RANKS for chunk in range(contender.chunks)]
    if contender.v_shaped:
        held = [rank, total - 1 - rank]
    modules = [workload.stage_fn(index, total) for index in held]
    if backend != "eager":
        for module in modules:
            module.compile(backend=backend)
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(module, index, total, cpu)
        for module, index in zip(modules, held, strict=True)
    ]
    schedule = contender.schedule(
        stages if contender.chunks > 1 else stages[0], count, loss_fn=workload.loss_fn
    )
    inputs, targets = batch

    def call() -> None:
        args = (inputs,) if 0 in held else ()
        more = {"target": targets, "losses": []} if total - 1 in held else {}
        schedule.step(*args, **more)
        _forget(modules)

    return call


def _forget(modules: Any) -> None:
    module: nn.Module
    for module in modules:
        module.zero_grad(set_to_none=True)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    quarters = statistics.quantiles(values, n=4)
    return quarters[2] - quarters[0]
