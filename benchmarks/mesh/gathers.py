"""Sharded stages: parameters gathered at a time, and waits for all-gathers, beside torch's."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage, schedules

from autosplit.pipeline import PipelineTrainer, build
from autosplit.pipeline.schedule.schedule import ActionKind
from autosplit.ranks.launch import launch

from ..results import Rows, mark, table
from .collectives import WIDTH, Mlp

BLOCKS, MICROBATCHES, ROWS = 12, 4, 256
SCHEDULE, STAGES = "interleaved", 4
RESHARDS = (False, True)
DELAYS = (0.0, 0.005, 0.02)
HOOKS, TORCH, TRAINER = "FSDP2's hooks", "torch's schedule", "our trainer"


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


class GatherWait(NamedTuple):
    """A wait for an all-gather, in seconds.

    Attributes:
        seconds: the wait.
        exposed: the part of the delay that it waited for. What Gloo takes longer, or the other rank
            comes later, is not in it.
    """

    seconds: float
    exposed: float


class LateWork(dist.Work):
    """An all-gather that ends some time after its start."""

    def __init__(self, work: Any, delay: float, waits: list[GatherWait]) -> None:
        super().__init__()
        self._work, self._waits = work, waits
        self._end = time.perf_counter() + delay

    def wait(self, *args: Any) -> bool:
        start = time.perf_counter()
        exposed = max(0.0, self._end - start)
        time.sleep(exposed)
        done = bool(self._work.wait(*args))
        self._waits.append(GatherWait(time.perf_counter() - start, exposed))
        return done


@contextlib.contextmanager
def late_gathers(delay: float) -> Iterator[list[GatherWait]]:
    """Let all-gathers take longer; gives each wait for one.

    On CPUs, FSDP2's own hooks wait for an all-gather where they start it.
    """
    waits: list[GatherWait] = []
    call: Any = DefaultAllGather.__call__

    def start(self: Any, *args: Any, **options: Any) -> Any:
        is_async = options.pop("async_op", False)
        work = LateWork(call(self, *args, **options, async_op=True), delay, waits)
        if is_async:
            return work
        work.wait()
        return None

    with mock.patch.object(DefaultAllGather, "__call__", start):
        yield waits


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """A row for each setting and contender, of the rank with the most."""
    found = launch(_rank, 4, (steps,), timeout=600)
    for rows in zip(*found, strict=True):
        name = f"{rows[0]['reshards']}, {rows[0]['delay']}, {rows[0]['way']}"
        yield {**rows[0], "name": name} | {
            key: max(row[key] for row in rows) for key in ("most", "waited", "exposed", "gathers")
        }


def _rank(steps: int) -> Rows:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    rows: Rows = []
    ways = {HOOKS: _hooks, TORCH: _torch_schedule, TRAINER: _trainer}
    for reshards, (way, contender) in itertools.product(RESHARDS, ways.items()):
        with contextlib.ExitStack() as stack:
            step = contender(mesh, reshards, stack)
            for _ in range(3):  # the order of gathers is known after the first
                step()
            for delay in DELAYS:
                row = {"way": way, "reshards": reshards, "delay": delay}
                rows.append(row | _measured(step, delay, steps))
    return rows


def _measured(step: Callable[[], object], delay: float, steps: int) -> dict[str, Any]:
    gathered, counts, sums = GatheredBytes(), [], []
    for _ in range(steps):
        dist.barrier()
        with gathered.counted(), late_gathers(delay) as waits:
            step()
        counts.append(len(waits))
        sums.append([*map(sum, zip(*waits, strict=True))])
    waited, exposed = map(statistics.median, zip(*sums, strict=True))
    gathers = statistics.median(counts)
    return {"most": gathered.most, "waited": waited, "exposed": exposed, "gathers": gathers}


def _stage(mesh: DeviceMesh, reshards: bool, index: int) -> nn.Module:
    torch.manual_seed(index)
    module: Any = nn.Sequential(*(Mlp() for _ in range(BLOCKS // STAGES)))
    for part in (*module, module):
        fully_shard(part, mesh=mesh["dp_shard"], reshard_after_forward=reshards)
    return module  # type: ignore[no-any-return]


def _modules(mesh: DeviceMesh, reshards: bool) -> dict[int, nn.Module]:
    indices = range(mesh.get_local_rank("pp"), STAGES, 2)
    return {index: _stage(mesh, reshards, index) for index in indices}


def _batch(mesh: DeviceMesh) -> Tensor:
    torch.manual_seed(mesh.get_local_rank("dp_shard"))
    return torch.randn(2, MICROBATCHES * ROWS, WIDTH)


def _trainer(mesh: DeviceMesh, reshards: bool, stack: contextlib.ExitStack) -> Callable[[], object]:
    trainer = stack.enter_context(
        PipelineTrainer(
            partial(_stage, mesh, reshards),
            F.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            stages=STAGES,
            microbatches=MICROBATCHES,
            schedule=SCHEDULE,
            mesh=mesh,
        )
    )
    inputs, targets = _batch(mesh)
    return lambda: trainer.step((inputs, targets))


def _torch_schedule(
    mesh: DeviceMesh, reshards: bool, _: contextlib.ExitStack
) -> Callable[[], object]:
    """Torch's schedule, which gathers whole stages ahead."""
    rank, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    modules, (inputs, targets) = _modules(mesh, reshards), _batch(mesh)
    stages = [
        PipelineStage(module, index, STAGES, torch.device("cpu"), group=group)
        for index, module in modules.items()
    ]
    kind: Any = schedules.ScheduleInterleaved1F1B
    schedule = kind(stages, MICROBATCHES, loss_fn=F.mse_loss)

    def step() -> None:
        schedule.step(*([] if rank else [inputs]), **({"target": targets} if rank else {}))
        for module in modules.values():
            module.zero_grad()

    return step


def _hooks(mesh: DeviceMesh, reshards: bool, _: contextlib.ExitStack) -> Callable[[], object]:
    """The row of each rank by FSDP2's hooks alone, action by action, without messages."""
    modules, inputs = _modules(mesh, reshards), _batch(mesh)[0]
    row = build(SCHEDULE, STAGES, MICROBATCHES, ranks=2, split_backward=False).ranks[
        mesh.get_local_rank("pp")
    ]

    def step() -> None:
        outputs: dict[tuple[int, int], Tensor] = {}
        for action in row:
            key = action.stage, action.microbatch
            if action.kind is ActionKind.FORWARD:
                microbatch = inputs.chunk(MICROBATCHES)[action.microbatch].detach()
                outputs[key] = modules[action.stage](microbatch.requires_grad_())
            else:
                outputs.pop(key).sum().backward()
        for module in modules.values():
            module.zero_grad()

    return step


def render(rows: Rows) -> str:
    """A line a setting and contender; what gathers more than FSDP2's hooks is bold."""
    cells: list[list[str]] = []
    base: dict[tuple[bool, float], dict[str, Any]] = {}
    for row in rows:
        if row["way"] == HOOKS:
            base[row["reshards"], row["delay"]] = row
        other = base[row["reshards"], row["delay"]]
        ratio = row["most"] / other["most"]
        cells.append(
            [
                str(row["reshards"]),
                f"{1e3 * row['delay']:.0f}",
                row["way"],
                f"{row['most'] / 2**20:.1f}",
                "" if row is other else mark(f"{ratio:.2f}", ratio <= 1.1),
                f"{row['gathers']:.0f}",
                f"{1e3 * row['waited']:.1f}",
                f"{1e3 * row['exposed']:.1f}",
            ]
        )
    heads = ["reshard_after_forward", "all-gathers, ms later", "who", "gathered MiB"]
    counts = ["/ FSDP2's", "all-gathers", "waits for them, ms", "of these, for the delay"]
    return table([*heads, *counts], cells)
