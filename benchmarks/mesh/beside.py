"""Steps of meshes beside those of torch.distributed.pipelining with FSDP2, DDP and DTensor."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from autosplit.pipeline import PipelineTrainer
from autosplit.pipelining import SplitPipelineStage
from autosplit.ranks.launch import launch
from autosplit.torch_internals.dtensor import local_tensor

from ..pipeline.turns import Turn, attempt, forget, root_of, take_turns
from ..results import Rows, mark, table
from ..torch_pipelining.activations import activation_peak
from .collectives import WIDTH, Mlp

BLOCKS, MICROBATCHES = 8, 4
ROWS, TOKENS = 4, 64  # of a microbatch
_COUNTED = 3  # steps whose bytes are counted
_MOST = 45.0  # seconds that a rank waits for a message of a contender that has failed elsewhere

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "pp 4": (("pp",), (4,)),
    "pp 2 x dp_replicate 2": (("pp", "dp_replicate"), (2, 2)),
    "pp 2 x dp_shard 2": (("pp", "dp_shard"), (2, 2)),
    "pp 2 x tp 2": (("pp", "tp"), (2, 2)),
    "pp 2 x dp_shard 2 x tp 2": (("pp", "dp_shard", "tp"), (2, 2, 2)),
}
SCHEDULES = {"1f1b": (1, "Schedule1F1B"), "interleaved": (2, "ScheduleInterleavedZeroBubble")}
"""Stages a rank, and torch's schedule of that name."""

TORCH, STAGE, TRAINER = "torch's stage", "our stage, torch's schedule", "our trainer"


def block(index: int) -> nn.Module:
    torch.manual_seed(index)
    return Mlp()


@dataclasses.dataclass
class Contender:
    """One program that trains the stages of this rank.

    Attributes:
        step: forward and backward of a batch, whose gradients are reduced behind it.
        modules: this rank's stages by index.
    """

    step: Callable[[], Any]
    modules: dict[int, nn.Module]

    def clear(self) -> None:
        forget(self.modules.values())

    def again(self) -> None:
        """A step, whose gradients are left."""
        self.clear()
        self.step()

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        return {
            (stage, name.removeprefix("module.")): local_tensor(parameter.grad).clone()
            for stage, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }


class Task:
    """What every contender trains on this rank."""

    def __init__(self, mesh: DeviceMesh, schedule: str) -> None:
        self.mesh = mesh
        self.names = mesh.mesh_dim_names or ()
        self.chunks, self.torchs = SCHEDULES[schedule]
        self.schedule = schedule
        self.ranks, self.rank = mesh["pp"].size(), mesh.get_local_rank("pp")
        self.stages = self.chunks * self.ranks
        self.mine = [self.rank + self.ranks * at for at in range(self.chunks)]
        share = 0
        for name in ("dp_replicate", "dp_shard"):
            if name in self.names:
                share = share * mesh[name].size() + mesh.get_local_rank(name)
        generator = torch.Generator().manual_seed(share)
        shape = (MICROBATCHES * ROWS, TOKENS, WIDTH)
        self.inputs, self.targets = (torch.randn(shape, generator=generator) for _ in range(2))

    def build(self, index: int) -> nn.Module:
        """A stage, its tensors shared and sharded by torch's tools; ZeRO-2 over microbatches."""
        share = BLOCKS // self.stages
        module: Any = nn.Sequential(*map(block, range(index * share, (index + 1) * share)))
        if "tp" in self.names:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for each in module:
                parallelize_module(each, self.mesh["tp"], plan)
        if "dp_shard" in self.names:
            for part in (*module, module):
                fully_shard(part, mesh=self.mesh["dp_shard"], reshard_after_forward=False)
        made: nn.Module = module
        return made

    def torch_schedule(self, kind: Any) -> Contender:
        """A schedule of torch's, with stages of a kind."""
        group = self.mesh["pp"].get_group()
        modules: dict[int, Any] = {index: self.build(index) for index in self.mine}
        if "dp_replicate" in self.names:
            replicas = self.mesh["dp_replicate"].get_group()
            for index, module in modules.items():
                modules[index] = DistributedDataParallel(module, process_group=replicas)
        stages = [
            kind(module, index, self.stages, torch.device("cpu"), group=group)
            for index, module in modules.items()
        ]
        given: Any = stages if self.chunks > 1 else stages[0]
        made = getattr(schedules, self.torchs)(given, MICROBATCHES, loss_fn=F.mse_loss)
        args = (self.inputs,) if 0 in self.mine else ()
        kwargs = {"target": self.targets} if self.stages - 1 in self.mine else {}
        return Contender(lambda: made.step(*args, **kwargs), modules)

    def trainer(self, stack: contextlib.ExitStack) -> Contender:
        """Ours."""
        made = stack.enter_context(
            PipelineTrainer(
                self.build,
                F.mse_loss,
                lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                stages=self.stages,
                microbatches=MICROBATCHES,
                schedule=self.schedule,
                mesh=self.mesh,
            )
        )
        batch = self.inputs, self.targets
        return Contender(lambda: made.forward_backward(batch), dict(made.modules))


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """A row for each mesh, schedule and contender."""
    for (mesh, (_, shape)), schedule in itertools.product(MESHES.items(), SCHEDULES):
        found = launch(on_rank, math.prod(shape), (mesh, schedule, steps), timeout=600)
        for at, row in enumerate(found[0]):
            name = f"{mesh}, {schedule}, {row['way']}"
            peaks = [rank[at]["peak"] for rank in found]
            same = all(rank[at]["same"] for rank in found)
            yield {**row, "name": name, "peak": max(peaks), "same": same}


def on_rank(name: str, schedule: str, steps: int) -> Rows:
    """Every contender in turn, in as many rounds as there are steps; each row of this rank."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    names, shape = MESHES[name]

    def task() -> Task:
        """On groups of its own, which a contender that fails leaves unusable."""
        gloo: Any = dist.ProcessGroupGloo
        limit = gloo._Options()
        limit._timeout = timedelta(seconds=_MOST)
        override: Any = dict.fromkeys(names, ("gloo", limit)) if len(names) > 1 else None
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)
        return Task(mesh, schedule)

    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        ways = {
            TRAINER: lambda: task().trainer(stack),
            STAGE: lambda: task().torch_schedule(SplitPipelineStage),
            TORCH: lambda: task().torch_schedule(PipelineStage),
        }
        running: dict[str, Contender] = {}

        def turn(way: str) -> Turn:
            made = ways[way]()
            running[way] = made
            return Turn(made.again, lambda: None, in_flight=False, gradients=0)

        made = {
            way: attempt(partial(turn, way), dist.new_group(), 2, lambda: None, _told)
            for way in ways
        }
        ready = {way: each for way, each in made.items() if isinstance(each, Turn)}
        seconds = take_turns(ready, steps)
        expected = running[TORCH].gradients() if TORCH in ready else {}
        for way in (TORCH, STAGE, TRAINER):
            row: dict[str, Any] = {"mesh": name, "schedule": schedule, "way": way, "said": ""}
            row |= {"seconds": [], "peak": 0, "same": True}
            if way in ready:
                mine = running[way].gradients()
                row["seconds"] = seconds[way]
                row["same"] = mine.keys() == expected.keys() and all(
                    torch.equal(mine[key], expected[key]) for key in mine
                )
                row["peak"] = _peak(running[way])
            else:
                row["said"] = str(made[way])
            rows.append(row)
    return rows


def _told(error: BaseException) -> str:
    """The first sentence of what was behind it all."""
    error = root_of(error)
    return f"{type(error).__name__}: {str(error).strip().partition('. ')[0].splitlines()[0]}"


def _peak(contender: Contender) -> int:
    found = []
    for _ in range(_COUNTED):
        contender.clear()
        dist.barrier()
        found.append(activation_peak(contender.step, contender.modules.values()))
    return min(found)


def render(rows: Rows) -> str:
    """A line a contender; ratios above those of torch's stage are bold."""
    cells = []
    base: dict[str, Any] = {}
    for row in rows:
        if row["way"] == TORCH:
            base = row
        start = [row["mesh"], row["schedule"], row["way"]]
        if not row["seconds"]:
            cells.append([*start, "fails", "", "", "", "", "", _short(row["said"])])
            continue
        times = [1e3 * each for each in row["seconds"]]
        compared = bool(base.get("seconds")) and row is not base
        cells.append(
            [
                *start,
                f"{statistics.median(times):.0f}",
                f"{min(times):.0f} to {max(times):.0f}",
                _bold(statistics.median(_ratios(row, base))) if compared else "",
                _spread(_ratios(row, base)) if compared else "",
                f"{row['peak'] / 2**20:.1f}",
                _bold(row["peak"] / base["peak"]) if compared and base["peak"] else "",
                ("yes" if row["same"] else "no") if compared else "",
            ]
        )
    headers = [
        *("mesh", "schedule", "who", "step ms", "spread", "/ torch's", "its spread", "peak MiB"),
        *("/ torch's", "bits of torch's"),
    ]
    return table(headers, cells)


def _ratios(row: dict[str, Any], base: dict[str, Any]) -> list[float]:
    """Of each round, as both have run close to each other."""
    return [mine / other for mine, other in zip(row["seconds"], base["seconds"], strict=True)]


def _spread(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _bold(ratio: float) -> str:
    return mark(f"{ratio:.2f}", ratio <= 1)


def _short(said: str) -> str:
    return said if len(said) <= 120 else f"{said[:117]}..."
