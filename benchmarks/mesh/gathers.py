"""Sharded stages: parameters gathered at a time, and waits for all-gathers, beside torch's."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage, schedules

from autosplit.pipeline import PipelineTrainer
from autosplit.ranks.launch import launch

from ..results import Rows, mark, table
from .collectives import WIDTH, Mlp

BLOCKS, MICROBATCHES, ROWS = 12, 4, 256
SCHEDULE, STAGES = "interleaved", 4
RESHARDS = (False, True)
DELAYS = (0.0, 0.005, 0.02)
TORCH, TRAINER = "torch's stages", "our trainer"


class GatheredBytes:
    """The bytes of gathered parameters, from the start of an all-gather to their release."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.most = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside."""
        unshard: Any = FSDPParamGroup.unshard
        free: Any = FSDPParamGroup._to_sharded

        def start(group: Any, *args: Any, **options: Any) -> None:
            unshard(group, *args, **options)
            parameters = group.fsdp_params
            size = sum(p._orig_size.numel() * p.sharded_param.itemsize for p in parameters)
            self._sizes[id(group)] = size
            self.most = max(self.most, sum(self._sizes.values()))

        def release(group: Any) -> None:
            free(group)
            self._sizes.pop(id(group), None)

        with (
            mock.patch.object(FSDPParamGroup, "unshard", start),
            mock.patch.object(FSDPParamGroup, "_to_sharded", release),
        ):
            yield


class LateWork(dist.Work):
    """An all-gather that ends some time after its start."""

    def __init__(self, work: Any, delay: float, waited: list[float]) -> None:
        super().__init__()
        self._work, self._waited = work, waited
        self._end = time.perf_counter() + delay

    def wait(self, *args: Any) -> bool:
        start = time.perf_counter()
        time.sleep(max(0.0, self._end - start))
        done = bool(self._work.wait(*args))
        self._waited.append(time.perf_counter() - start)
        return done


@contextlib.contextmanager
def late_gathers(delay: float) -> Iterator[list[float]]:
    """Let all-gathers take longer; gives the seconds of each wait for one.

    On CPUs, FSDP2's own hooks wait for an all-gather where they start it.
    """
    waited: list[float] = []
    call: Any = DefaultAllGather.__call__

    def start(self: Any, *args: Any, **options: Any) -> Any:
        is_async = options.pop("async_op", False)
        work = LateWork(call(self, *args, **options, async_op=True), delay, waited)
        if is_async:
            return work
        work.wait()
        return None

    with mock.patch.object(DefaultAllGather, "__call__", start):
        yield waited


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """A row for each setting and contender, of the rank with the most."""
    for reshards, way in itertools.product(RESHARDS, (TORCH, TRAINER)):
        found = launch(_rank, 4, (way, reshards, steps), timeout=600)
        for delay, *rows in zip(DELAYS, *found, strict=True):
            name = f"{reshards}, {delay}, {way}"
            row = {"name": name, "way": way, "reshards": reshards, "delay": delay}
            yield row | {key: max(each[key] for each in rows) for key in rows[0]}


def _rank(way: str, reshards: bool, steps: int) -> Rows:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    rows: Rows = []
    with contextlib.ExitStack() as stack:
        step = _contender(way, mesh, reshards, stack)
        for _ in range(3):  # orders are known after the first
            step()
        for delay in DELAYS:
            gathered, waits = GatheredBytes(), []
            for _ in range(steps):
                dist.barrier()
                with gathered.counted(), late_gathers(delay) as waited:
                    step()
                waits.append(sum(waited))
            rows.append({"most": gathered.most, "waited": statistics.median(waits)})
    return rows


def _contender(
    way: str,
    mesh: DeviceMesh,
    reshards: bool,
    stack: contextlib.ExitStack,
) -> Callable[[], Any]:
    rank = mesh.get_local_rank("pp")

    def build(index: int) -> nn.Module:
        torch.manual_seed(index)
        module: Any = nn.Sequential(*(Mlp() for _ in range(BLOCKS // STAGES)))
        for part in (*module, module):
            fully_shard(part, mesh=mesh["dp_shard"], reshard_after_forward=reshards)
        return module  # type: ignore[no-any-return]

    batch = torch.randn(2, MICROBATCHES * ROWS, WIDTH)
    if way == TRAINER:
        trainer = stack.enter_context(
            PipelineTrainer(
                build,
                F.mse_loss,
                lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                stages=STAGES,
                microbatches=MICROBATCHES,
                schedule=SCHEDULE,
                mesh=mesh,
            )
        )
        return lambda: trainer.step((batch[0], batch[1]))
    modules = {index: build(index) for index in range(rank, STAGES, 2)}
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(module, index, STAGES, torch.device("cpu"), group=group)
        for index, module in modules.items()
    ]
    kind: Any = schedules.ScheduleInterleaved1F1B
    schedule = kind(stages, MICROBATCHES, loss_fn=F.mse_loss)

    def step() -> None:
        args = (batch[0],) if rank == 0 else ()
        kwargs = {"target": batch[1]} if rank else {}
        schedule.step(*args, **kwargs)
        for module in modules.values():
            module.zero_grad()

    return step


def render(rows: Rows) -> str:
    """A line a setting and contender; what is more than torch's is bold."""
    cells: list[list[str]] = []
    base: dict[tuple[bool, float], dict[str, Any]] = {}
    for row in rows:
        if row["way"] == TORCH:
            base[row["reshards"], row["delay"]] = row
        other = base[row["reshards"], row["delay"]]
        milliseconds = f"{1e3 * row['waited']:.1f}"
        ratio = row["most"] / other["most"]
        cells.append(
            [
                str(row["reshards"]),
                f"{1e3 * row['delay']:.0f}",
                row["way"],
                f"{row['most'] / 2**20:.1f}",
                "" if row is other else mark(f"{ratio:.2f}", ratio <= 1.1),
                milliseconds
                if row is other
                else mark(milliseconds, row["waited"] <= other["waited"]),
            ]
        )
    heads = ["reshard_after_forward", "all-gathers, ms later", "who", "gathered MiB"]
    return table([*heads, "/ torch's", "waits for them, ms"], cells)
