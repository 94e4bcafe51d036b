"""Our schedules over meshes, run by Gloo's rules and by NCCL's, in the same processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipelining import SplitPipelineStage
from tests.kept_ranks import forget_meshes
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped
from tests.pipelining.programs import Program, block
from tests.zoo import mlp

from .group import over

WIDTH, STEPS = 4, 2
MESHES = {
    "pp=2": (2,),
    "pp=4": (4,),
    "pp=8": (8,),
    "pp=2,dp_replicate=2": (2, 2),
    "pp=2,dp_shard=2": (2, 2),
    "pp=2,tp=2": (2, 2),
    "pp=4,dp_replicate=2": (4, 2),
    "pp=4,dp_shard=2": (4, 2),
    "pp=4,tp=2": (4, 2),
    "pp=2,dp_replicate=2,dp_shard=2": (2, 2, 2),
    "pp=2,dp_replicate=2,tp=2": (2, 2, 2),
    "pp=2,dp_shard=2,tp=2": (2, 2, 2),
}
"""By what is asked for, the sizes."""


def _stages(mesh: DeviceMesh) -> Callable[[int], nn.Module]:
    names = mesh.mesh_dim_names or ()
    copies = tuple(item for item in ("dp_replicate", "dp_shard") if item in names)

    def build(index: int) -> nn.Module:
        torch.manual_seed(index)
        module: Any = mlp(WIDTH)
        if "tp" in names:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            module = parallelize_module(module, mesh["tp"], plan)
        return fully_shard(module, mesh=mesh[copies]) if "dp_shard" in names else module

    return build


def _share(mesh: DeviceMesh, step: int) -> tuple[Tensor, Tensor]:
    names = mesh.mesh_dim_names or ()
    place = [mesh.get_local_rank(name) for name in names if name.startswith("dp")]
    generator = torch.Generator().manual_seed(100 * step + sum(place) + 10 * len(place))
    rows = 2 * _microbatches(mesh)
    return (
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, WIDTH, generator=generator),
    )


def _microbatches(mesh: DeviceMesh) -> int:
    """As many as every schedule admits."""
    return 2 * int(mesh.shape[0])


def trained(mesh_text: str, schedule: str) -> list[Any]:
    """This rank's losses, gradients and parameters after each of a few steps."""
    names = tuple(item.partition("=")[0] for item in mesh_text.split(","))
    mesh = init_device_mesh("cpu", MESHES[mesh_text], mesh_dim_names=names)
    ranks = mesh.shape[0]
    # Without collectives in graphs, messages are those of any stage.
    factory = None if {"tp", "dp_shard"} & {*names} else ReferenceStage
    results: list[Any] = []
    with PipelineTrainer(
        _stages(mesh),
        F.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        stages=ranks * (SCHEDULES[schedule].chunks or 2),
        microbatches=_microbatches(mesh),
        mesh=mesh,
        **grouped(schedule=schedule, max_grad_norm=1e9, stage_factory=factory),
    ) as trainer:
        for step in range(STEPS):
            results.append(trainer.forward_backward(_share(mesh, step)).clone())
            results.append(_copied(trainer.gradients()))
            results.append(trainer.grad_norm)
            for module in trainer.modules.values():
                module.zero_grad()
        trainer.step(_share(mesh, STEPS))
        results.append(
            _copied({at: dict(m.named_parameters()) for at, m in trainer.modules.items()})
        )
    return results


def _copied(tensors: dict[int, Any]) -> dict[tuple[int, str], Tensor]:
    return {
        (stage, name): (item.to_local() if isinstance(item, DTensor) else item).detach().clone()
        for stage, row in tensors.items()
        for name, item in row.items()
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def compared(cells: Sequence[tuple[str, str]], texts: Sequence[str]) -> dict[str, str]:
    """Of each mesh and schedule, and each strictness, whether all is bit for bit what it is over
    Gloo: "equal" or "differs".
    """
    with over("gloo"):
        expected = {cell: trained(*cell) for cell in cells}
    results = {}
    for text in texts:
        forget_meshes()
        with over(text):
            for cell in cells:
                mine = trained(*cell)
                equal = all(itertools.starmap(_same, zip(mine, expected[cell], strict=True)))
                results[" ".join((*cell, text))] = "equal" if equal else "differs"
                dist.barrier()
    return results


# --- torch's own ----------------------------------------------------------------------------------

TORCHS = {"ScheduleInterleaved1F1B": (4, 4), "ScheduleDualPipeV": (4, 8)}
"""On two ranks: stages and microbatches. `--comm strict tests/pipelining` has the others."""


def _torchs_gradients(kind: str, stage: Any) -> list[Tensor]:
    """Of this rank's stages, after two steps of a schedule of torch's."""
    torch.manual_seed(0)
    stages, microbatches = TORCHS[kind]
    program = Program(
        [block() for _ in range(stages)],
        kind=kind,
        microbatches=microbatches,
        args=[torch.randn(16, 4)],
        target=torch.randn(16, 4),
        stage=stage,
    )
    for _ in range(2):
        program.step()
    grads = [p.grad for at in program.mine for p in program.parts[at].parameters()]
    return [grad.clone() for grad in grads if grad is not None]


def torchs_compared(text: str, kinds: Sequence[str]) -> dict[str, bool]:
    """Of each schedule, with torch's stages and with ours, whether it gives what it gives over
    Gloo.
    """
    results = {}
    for kind in kinds:
        for stage in (PipelineStage, SplitPipelineStage):
            with over("gloo"):
                expected = _torchs_gradients(kind, stage)
            with over(text):
                mine = _torchs_gradients(kind, stage)
            results[f"{kind} {stage.__name__}"] = all(map(torch.equal, mine, expected))
    return results
