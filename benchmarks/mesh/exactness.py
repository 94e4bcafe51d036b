"""Steps of meshes and schedules, held against plain autograd in one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.training import replicas as model_replicas

from ..results import Rows, table

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 16, 4, 2
BLOCKS = 8  # of the model, however it is cut
CAP = 2**16  # so that a stage has several buckets

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "pp 2 x dp_replicate 2": (("pp", "dp_replicate"), (2, 2)),
    "dp_replicate 2 x pp 2": (("dp_replicate", "pp"), (2, 2)),
    "dp_replicate 4": (("dp_replicate",), (4,)),
    "pp 2 x dp_replicate 4": (("pp", "dp_replicate"), (2, 4)),
    "pp 4 x dp_replicate 2": (("pp", "dp_replicate"), (4, 2)),
    "pp 2 x dp_shard 2": (("pp", "dp_shard"), (2, 2)),
    "dp_shard 2 x pp 2": (("dp_shard", "pp"), (2, 2)),
    "pp 2 x dp_replicate 2 x dp_shard 2": (("pp", "dp_replicate", "dp_shard"), (2, 2, 2)),
    "pp 2 x tp 2": (("pp", "tp"), (2, 2)),
    "tp 2 x pp 2": (("tp", "pp"), (2, 2)),
    "pp 2 x dp_replicate 2 x tp 2": (("pp", "dp_replicate", "tp"), (2, 2, 2)),
    "pp 2 x dp_shard 2 x tp 2": (("pp", "dp_shard", "tp"), (2, 2, 2)),
}
_ALL_MEMORY = ("pp 2 x dp_replicate 2", "pp 2 x dp_shard 2", "pp 2 x tp 2")
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "1f1b, fused": {"schedule": "1f1b", "run_options": RunOptions(split_backward=False)},
    "interleaved": {"schedule": "interleaved"},
    "zb-v": {"schedule": "zb-v"},
}
MEMORY = ("fast", "balanced", "lean")
_KINDS = ("1f1b", "interleaved", "zb-v")


@dataclasses.dataclass(frozen=True)
class Case:
    """One mesh, schedule and memory setting."""

    mesh: str
    schedule: str
    memory: str

    @property
    def name(self) -> str:
        return f"{self.mesh}, {self.schedule}, memory={self.memory}"

    def stages(self, ranks: int) -> int:
        """Two a rank where the schedule wants them, else one; at least two."""
        chunks = 2 if self.schedule in ("interleaved", "zb-v") else 1
        return max(2, chunks * ranks)


def stage_of(index: int, stages: int) -> nn.Sequential:
    """Stage ``index`` of so many, with an equal share of the model's blocks."""
    share = BLOCKS // stages
    return nn.Sequential(*(Block(at) for at in range(index * share, (index + 1) * share)))


class Block(nn.Module):
    """A residual block with a norm and a bias: gradients of every kind."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


def cases() -> Iterator[Case]:
    for mesh, (names, _) in MESHES.items():
        for schedule in SCHEDULES:
            if schedule == "zb-v" and "pp" not in names:
                continue
            settings = MEMORY if mesh in _ALL_MEMORY else MEMORY[1:2]
            yield from (Case(mesh, schedule, memory) for memory in settings)


def some_cases() -> Iterator[Case]:
    """A slice of all: meshes of four ranks under each kind of schedule, those with three dimensions
    under one, and the memory settings in turns.
    """
    memory, three = itertools.cycle(MEMORY), itertools.cycle(_KINDS)
    for mesh, (names, shape) in MESHES.items():
        if math.prod(shape) == 4:
            kinds = [kind for kind in _KINDS if kind != "zb-v" or "pp" in names]
        else:
            kinds = [next(three)] if len(names) == 3 else []
        yield from (Case(mesh, kind, next(memory)) for kind in kinds)


def measure(only: str = "", sliced: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each case whose name has ``only`` in it; of a slice of them, where asked."""
    for mesh, (_, shape) in MESHES.items():
        every = some_cases() if sliced else cases()
        mine = [each for each in every if each.mesh == mesh and only in each.name]
        if mine:
            found = launch(on_rank, math.prod(shape), (mine,), timeout=900)
            for number, case in enumerate(mine):
                yield {"name": case.name, **dataclasses.asdict(case), **_worst(found, number)}


def _worst(found: list[Rows], number: int) -> dict[str, Any]:
    rows = [rank[number] for rank in found]
    return {
        "replicas": rows[0]["replicas"],
        "equal": all(row["equal"] for row in rows),
        "difference": max(row["difference"] for row in rows),
        "norm": all(row["norm"] for row in rows),
        "norms": sorted({row["grad_norm"] for row in rows}),
        "reductions": max(row["reductions"] for row in rows),
        "buckets": max(row["buckets"] for row in rows),
    }


def on_rank(mine: list[Case]) -> Rows:
    return [_run(case) for case in mine]


def _run(case: Case) -> dict[str, Any]:
    names, shape = MESHES[case.mesh]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    sizes: Mapping[str, int] = dict(zip(names, shape, strict=True))
    shards = sizes.get("dp_shard", 1)
    stages, replicas = case.stages(sizes.get("pp", 1)), shards * sizes.get("dp_replicate", 1)
    reference, norm = _by_hand(stages, replicas, mesh)
    counted: list[int] = []
    with (
        mock.patch.object(model_replicas, "CAP", CAP),
        PipelineTrainer(
            functools.partial(_built, stages=stages, mesh=mesh),
            F.mse_loss,
            lambda parameters: torch.optim.AdamW(parameters),
            stages=stages,
            microbatches=MICROBATCHES,
            mesh=mesh,
            max_grad_norm=1e9,
            stage_options=StageOptions(memory=case.memory),
            **SCHEDULES[case.schedule],
        ) as trainer,
    ):
        share = _share(_replica(mesh))
        trainer.forward_backward(share)
        pairs = [
            (_whole(gradient), reference[stage][name])
            for stage, own in trainer.gradients().items()
            for name, gradient in own.items()
        ]
        found = trainer.grad_norm
        for module in trainer.modules.values():
            module.zero_grad(set_to_none=True)
        with _counting(counted):
            for _ in range(STEPS):
                trainer.step(share)
    difference = max((mine - other).abs().max().item() for mine, other in pairs)
    return {
        "replicas": replicas,
        "equal": all(torch.equal(mine, other) for mine, other in pairs),
        "difference": difference,
        "norm": found == norm,
        "grad_norm": found,
        "reductions": len(counted) / STEPS,
        "buckets": _groups(trainer.modules.values())
        if shards > 1
        else _buckets([p for m in trainer.modules.values() for p in m.parameters()])
        if replicas > 1
        else 0,
    }


def _built(index: int, stages: int, mesh: DeviceMesh) -> nn.Module:
    """A stage, shared by ranks and sharded block by block where the mesh has dimensions for it."""
    module = stage_of(index, stages)
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in module:
            parallelize_module(block, mesh["tp"], plan)
    if "dp_shard" in names:
        over = mesh["dp_replicate", "dp_shard"] if "dp_replicate" in names else mesh["dp_shard"]
        for block in module:
            fully_shard(block, mesh=over)
        fully_shard(module, mesh=over)
    return module


def _whole(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def _replica(mesh: DeviceMesh) -> int:
    """Which share of the batch is this rank's."""
    number = 0
    names = mesh.mesh_dim_names or ()
    for name in ("dp_replicate", "dp_shard"):
        if name in names:
            number = number * mesh.size(names.index(name)) + mesh.get_local_rank(name)
    return number


def _groups(modules: Iterable[nn.Module]) -> int:
    """So many parameter groups: the blocks, as nothing is beside them."""
    return sum(isinstance(part, Block) for module in modules for part in module.modules())


def _buckets(parameters: list[nn.Parameter]) -> int:
    """At least so many messages carry these gradients."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return math.ceil(sum(p.nbytes for p in own) / CAP)


class _counting:  # noqa: N801
    """Notes the elements of every all-reduce of gradients inside, or of every reduce-scatter: of
    copies of shards, an all-reduce follows each.
    """

    def __init__(self, found: list[int]) -> None:
        self._found = found
        self._all_reduced: list[int] = []
        self._reduce = dist.all_reduce
        self._scatter: Any = DefaultReduceScatter.__call__

    def __enter__(self) -> None:
        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.float32 and tensor.numel() > 1:
                self._all_reduced.append(tensor.numel())
            return self._reduce(tensor, *args, **kwargs)

        def reduce_scatter(call: Any, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._found.append(output_tensor.numel())
            return self._scatter(call, output_tensor, *args, **kwargs)

        dist.all_reduce = all_reduce
        setattr(DefaultReduceScatter, "__call__", reduce_scatter)  # noqa: B010

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._reduce
        setattr(DefaultReduceScatter, "__call__", self._scatter)  # noqa: B010
        self._found[:] = self._found or self._all_reduced


def _share(replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )


def _by_hand(stages: int, replicas: int, mesh: DeviceMesh) -> tuple[list[dict[str, Tensor]], float]:
    """Gradients by stage and name, each the mean over the replicas' shares, and their norm. Where
    ranks share tensors, they do so here, too, with all stages on each of them.
    """
    shared = "tp" in (mesh.mesh_dim_names or ())
    make = functools.partial(_built, stages=stages, mesh=mesh["tp"] if shared else mesh)
    modules = [make(index) if shared else stage_of(index, stages) for index in range(stages)]
    model = nn.Sequential(*modules)
    sums: list[Tensor] = []
    for replica in range(replicas):
        model.zero_grad(set_to_none=True)
        inputs, targets = (part.chunk(MICROBATCHES) for part in _share(replica))
        for x, y in zip(inputs, targets, strict=True):
            (F.mse_loss(model(x), y) / MICROBATCHES).backward()
        own = [_whole(p.grad) for p in model.parameters() if p.grad is not None]
        sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else own
    means = [each / replicas for each in sums]
    squares = [x * x for g in means for x in g.double().flatten().tolist()]
    left = iter(means)
    found = [{name: next(left) for name, _ in module.named_parameters()} for module in modules]
    return found, math.sqrt(math.fsum(squares))


def render(rows: Rows) -> str:
    """A line for each mesh and schedule, over the memory settings."""
    cells = []
    for mesh, schedule in dict.fromkeys((row["mesh"], row["schedule"]) for row in rows):
        mine = [row for row in rows if (row["mesh"], row["schedule"]) == (mesh, schedule)]
        norms = {norm for row in mine for norm in row["norms"]}
        cells.append(
            [
                mesh,
                schedule,
                ", ".join(row["memory"] for row in mine),
                "yes" if all(row["equal"] for row in mine) else "no",
                f"{max(row['difference'] for row in mine):.2g}",
                "yes" if all(row["norm"] for row in mine) else "no",
                str(len(norms)),
                f"{max(row['reductions'] for row in mine):g}",
                f"{max(row['buckets'] for row in mine):g}",
            ]
        )
    alike = [row for row in rows if row["replicas"] == 2 and "tp" not in row["mesh"]]
    two = {norm for row in alike for norm in row["norms"]}
    headers = [
        *("mesh", "schedule", "memory", "bit for bit", "largest difference"),
        *("norm bit for bit", "norms seen", "reductions a step", "buckets, at least"),
    ]
    verdict = "one norm" if len(two) == 1 else f"**{len(two)} norms**"
    return (
        f"{table(headers, cells)}\n\nOver all schedules, cuts and memory settings with two "
        f"replicas: {verdict}, {', '.join(f'{norm!r}' for norm in sorted(two))}."
    )
