"""What ranks of a mesh run in tests, and the models they train."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from autosplit.errors import AutosplitError
from autosplit.mesh.reduction import CAP
from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.engine.results import Bucket
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.training import replicas as model_replicas
from autosplit.stage import Stage
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped

WIDTH, ROWS, M = 6, 8, 4


def block(index: int) -> nn.Module:
    """Stage ``index``, the same on every call."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def share(replica: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """A replica's share of the batch."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(10 * step + replica)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def trainer(
    mesh: DeviceMesh | None = None, build: Any = block, stages: int | None = 2, **options: Any
) -> PipelineTrainer:
    """``cap``: bytes of a bucket, of which one trainer makes its own in its first step."""
    model_replicas.CAP = options.pop("cap", CAP)
    options = {"microbatches": M, "timeout": 60.0, **options}
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if {"ep", "cp"} & {*names} and "stage_factory" not in options:
        options.setdefault("overlap", "collectives")  # nothing is measured, which takes a second
    loss_fn = options.pop("loss_fn", F.mse_loss)
    return PipelineTrainer(
        build,
        loss_fn,
        options.pop("optimizer_fn", adam),
        stages=stages,
        mesh=mesh,
        **grouped(**options),
    )


def replica_of(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank("dp_replicate") if "dp_replicate" in names else 0


def of_shares(
    model: nn.Module, shares: Iterable[tuple[Tensor, Tensor]], loss_fn: Any
) -> tuple[list[list[float]], dict[str, Tensor], float]:
    """What eager mode makes of each share of a batch, microbatch by microbatch: the losses by
    share, the means of the gradients, whole, and their norm.
    """
    losses: list[list[float]] = []
    sums: dict[str, Tensor] = {}
    for inputs, targets in shares:
        model.zero_grad()
        losses.append([])
        for x, y in zip(inputs.chunk(M), targets.chunk(M), strict=True):
            loss = loss_fn(model(x), y)
            (loss / M).backward()
            losses[-1].append(whole(loss.detach()).item())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = whole(parameter.grad)
                sums[name] = sums[name] + gradient if name in sums else gradient
    gradients = {name: total / len(losses) for name, total in sums.items()}
    return losses, gradients, norm_of(gradients.values())


def by_hand(
    build: Callable[[int], nn.Module], stages: int, replicas: int
) -> tuple[nn.Sequential, list[list[float]], float]:
    """The same of the whole model in one process, the gradients in ``.grad``."""
    model = nn.Sequential(*(build(index) for index in range(stages)))
    losses, gradients, norm = of_shares(model, map(share, range(replicas)), F.mse_loss)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    return model, losses, norm


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def norm_of(grads: Iterable[Tensor]) -> float:
    """The norm of gradients, with one rounding behind the squares' and one behind their sum."""
    return math.sqrt(math.fsum(x * x for g in grads for x in g.double().flatten().tolist()))


def agrees(made: PipelineTrainer, model: nn.Sequential) -> bool:
    """Whether this rank's gradients are those of the model, bit for bit."""
    for stage, found in made.gradients().items():
        expected = dict(model[stage].named_parameters())
        if found.keys() != {name for name, p in expected.items() if p.grad is not None}:
            return False
        if not all(torch.equal(found[name], expected[name].grad) for name in found):
            return False
    return True


@contextlib.contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """The bytes of each all-reduce of gradients that starts inside."""
    found: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype != torch.float64 and tensor.numel() > 1:  # not losses, norms, meetings
            found.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield found
    finally:
        dist.all_reduce = original


def refusal(act: Callable[[], Any]) -> str:
    """What is said to what cannot be."""
    try:
        act()
    except AutosplitError as error:
        return str(error)
    return "accepted"


# --- checkpoints ----------------------------------------------------------------------------------

Names = Callable[[int, str], str]
Make = Callable[[], PipelineTrainer]


def by_stage(stage: int, name: str) -> str:
    return f"{stage}.{name}"


def state(made: PipelineTrainer, names: Names) -> dict[str, Tensor]:
    """Whole parameters, and what the optimizer has of them."""
    found = {}
    for stage, module in made.modules.items():
        for name, parameter in module.named_parameters():
            values = {"": parameter.detach(), **made.optimizer.state[parameter]}
            key = names(stage, name)
            found |= {f"{key} {what}": whole(each).clone() for what, each in values.items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return bool(one) and all(torch.equal(one[key], other[key]) for key in one)


def round_trip(
    make: Make,
    alone: Make,
    batch: Callable[[int], Any],
    folder: Path,
    names: Names,
    *,
    own: Names | None = None,
    line: Make | None = None,
    **saving: Any,
) -> dict[str, bool]:
    """Train on a mesh, save, and go on there, on a ``line`` of ranks, in one process, and back."""
    found = {}
    own = own or names
    with make() as made:
        made.step(batch(0))
        save_checkpoint(made, folder / "mesh", names=names, step=7, **saving)
        before = state(made, names)
        made.step(batch(1))
        after = state(made, names)
        loaded = load_checkpoint(made, folder / "mesh", names=names)
        found["step"] = (loaded.step, loaded.generators) == (7, "continued")
        found["optimizer and model"] = same(before, state(made, names))
        made.step(batch(1))  # with the random numbers of before
        found["goes on"] = same(after, state(made, names))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, before)
        union = {key: value for each in everywhere for key, value in each.items()}
        read = {f"{key} ": each for key, each in read_checkpoint(folder / "mesh").items()}
        count = sum(key[-1] == " " for key in union)
        found["whole tensors"] = same(read, union) and len(read) == count
        if line is not None:
            with line() as other:
                load_checkpoint(other, folder / "mesh", names=own, generators=False)
                found["line"] = same(state(other, own), union)
        with alone() as other:
            load_checkpoint(other, folder / "mesh", names=own, generators=False)
            mine = state(other, own)
            found["one process"] = same(mine, union) and mine.keys() == union.keys()
            other.step(batch(0))
            mine = state(other, own)
            save_checkpoint(other, folder / f"alone{dist.get_rank()}", names=own)
        dist.all_gather_object(everywhere, mine)
        load_checkpoint(made, folder / "alone0", names=names)
        found["and back"] = same(state(made, names), everywhere[0])
    return found


# --- cases of four ranks --------------------------------------------------------------------------


def exactness(mesh: DeviceMesh, stages: int, **options: Any) -> dict[str, bool]:
    """A step's losses, gradients and norm, held against autograd in one process."""
    replicas = mesh.size() // (
        mesh.size(mesh.mesh_dim_names.index("pp")) if "pp" in (mesh.mesh_dim_names or ()) else 1
    )
    model, losses, norm = by_hand(block, stages, replicas)
    with trainer(mesh, stages=stages, max_grad_norm=1e9, **options) as made:
        seen = made.forward_backward(share(replica_of(mesh)))
        return {
            "losses": seen.tolist() == losses[replica_of(mesh)],
            "gradients": agrees(made, model),
            "norm": made.grad_norm == norm,
        }


REFERENCE = {"stage_factory": ReferenceStage}
EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "buckets": (2, {"cap": 10}),
    "fused": (2, {"split_backward": False, **REFERENCE}),
    "zb-v": (4, {"schedule": "zb-v", "cap": 100, **REFERENCE}),
}


class Counting(nn.Module):
    """A block with a buffer that each forward writes."""

    seen: Tensor

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = block(index)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(x)
        self.seen.copy_(found.detach().sum())
        return found


class Partly(nn.Module):
    """A block with a parameter that gets no gradient."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = block(index)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(x)
        return found


def once_each(mesh: DeviceMesh) -> dict[str, Any]:
    """The all-reduces of steps, by where they came from."""
    found: dict[str, Any] = {}
    own = share(replica_of(mesh))
    bytes_of = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)
    # Beside the gradients goes a number for each parameter.
    cases = {
        "one bucket": (CAP, [bytes_of + 16]),
        "one each": (10, sorted([4 * WIDTH * WIDTH + 4, 4 * WIDTH + 4] * 2)),
    }
    for name, (cap, expected) in cases.items():
        with trainer(mesh, cap=cap, **REFERENCE) as made:
            made.step(own)
            with counted_reductions() as reductions:
                made.step(own)
                made.step(own)
        found[name] = sorted(reductions) == sorted([*expected, *expected])
    return found


def under_way(mesh: DeviceMesh, **options: Any) -> list[str]:
    """Which W ran and which reductions started, in order, of this rank's stages."""
    found: list[str] = []
    run, start = Stage.backward_weight, Bucket.start

    def ran(self: Any, microbatch: Any) -> None:
        found.append(f"{self.index}W{microbatch}")
        run(self, microbatch)

    def started(self: Any) -> None:
        found.append("reduction")
        start(self)

    Stage.backward_weight, Bucket.start = ran, started  # type: ignore[method-assign]
    try:
        given = {"schedule": "gpipe", "weights": "2bp", "cap": 100, **options}
        with trainer(mesh, stages=4, microbatches=2, **given) as made:
            made.step(share(replica_of(mesh)))
    finally:
        Stage.backward_weight, Bucket.start = run, start  # type: ignore[method-assign]
    return found


def also(mesh: DeviceMesh) -> dict[str, Any]:
    """What else a replica shares, or does not, with the others."""
    replica = replica_of(mesh)
    own = share(replica)
    found: dict[str, Any] = {}

    def differing(index: int) -> nn.Module:
        torch.manual_seed(100 * replica + index)
        return Counting(index) if replica == 0 else Counting(index + 10)

    with trainer(mesh, differing, **REFERENCE) as made:
        made.step(own)
        values = [*made.state_dict().values()]
        evaluated = made.evaluate(own).tolist()
        found["public"] = made.mesh is mesh and made.rank == mesh.get_local_rank("pp")
    flat = torch.cat([each.flatten() for each in values[0].values()])
    rows = [torch.zeros_like(flat) for _ in range(4)]
    dist.all_gather(rows, flat)
    ranks = mesh.mesh.tolist()
    pp = mesh.get_local_rank("pp")
    found["equal weights and buffers"] = torch.equal(rows[ranks[pp][0]], rows[ranks[pp][1]])
    losses: list[Any] = [None] * 4
    dist.all_gather_object(losses, evaluated)
    found["own losses"] = losses[ranks[0][0]] != losses[ranks[0][1]]
    found["same in a pipeline"] = all(losses[a] == losses[b] for a, b in zip(*ranks, strict=True))

    model, _, _ = by_hand(Partly, 2, 2)
    with trainer(mesh, Partly, **REFERENCE) as made:
        made.forward_backward(own)
        found["unused"] = agrees(made, model)
        made.forward_backward(own)
        twice = made.gradients()
        found["accumulated"] = all(
            torch.equal(grad, 2 * dict(model[stage].named_parameters())[name].grad)
            for stage, grads in twice.items()
            for name, grad in grads.items()
        )
    with trainer(mesh, schedule="auto", **REFERENCE) as made:
        for _ in range(4):
            made.step(own)
        schedules: list[Any] = [None] * 4
        dist.all_gather_object(schedules, made.schedule.ranks)
        found["auto"] = all(each == schedules[0] for each in schedules)
    with trainer(mesh, **REFERENCE) as made:
        made.step(own)
        made.step(tuple(each[:4] for each in own))
        found["shapes"] = True
    found |= copies(mesh)
    with trainer(mesh, record="memory", **REFERENCE) as made:
        made.step(own)
        found["memory"] = len(made.memory().bands) == 2
        spans = made.timeline().spans
        reduced = [each for each in spans if each.action.kind is ActionKind.REDUCE_GRAD]
        found["timeline"] = sorted(str(each.action) for each in reduced)
    return found


class Tied(nn.Module):
    """A block with the parameter that all stages share."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = block(index)
        torch.manual_seed(7)
        self.tied = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(x) * self.tied
        return found


def copies(mesh: DeviceMesh) -> dict[str, bool]:
    """Copies of parameters within a pipeline, and a model that is cut: near one process, and the
    same bits wherever a parameter is.
    """
    own = share(replica_of(mesh))
    found: dict[str, bool] = {}
    model, _, _ = by_hand(Tied, 2, 2)
    named = [dict(module.named_parameters()) for module in model]
    total = named[0]["tied"].grad + named[1]["tied"].grad
    named[0]["tied"].grad = named[1]["tied"].grad = total
    norm = norm_of([total, *(p.grad for n in named for key, p in n.items() if key != "tied")])
    shared = [((0, "tied"), (1, "tied"))]
    options = {"shared_parameters": shared, **REFERENCE}
    with trainer(mesh, Tied, max_grad_norm=1e9, **options) as made:
        made.forward_backward(own)
        mine = {
            f"{stage}.{key}": grad
            for stage, grads in made.gradients().items()
            for key, grad in grads.items()
        }
        close = [
            torch.allclose(grad, named[int(key[0])][key[2:]].grad, atol=1e-6)
            for key, grad in mine.items()
        ]
        everywhere: list[Any] = [None] * 4
        dist.all_gather_object(everywhere, mine)
        same = [
            torch.equal(grad, mine[key])
            for part in everywhere
            for key, grad in part.items()
            if key in mine
        ]
        near = math.isclose(made.grad_norm or 0.0, norm, rel_tol=1e-6)
        found["tied"] = all(close) and all(same) and near
    return found


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """What is said to bad meshes and bad batches, on this rank."""
    replica = replica_of(mesh)
    own = share(replica)

    def built(made: DeviceMesh | None, **options: Any) -> str:
        return refusal(lambda: trainer(made, **{**REFERENCE, **options}))

    def ran(batch: Any, build: Any = block, **options: Any) -> str:
        def act() -> None:
            with trainer(mesh, build, **{**REFERENCE, **options}) as made:
                made.step(batch)
                made.step(batch)

        return refusal(act)

    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    half = tuple(each[:4] for each in own) if replica else own
    return {
        "dp": built(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))),
        "nameless": built(init_device_mesh("cpu", (2, 2))),
        "tp": built(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))),
        "half": built(DeviceMesh("cpu", [0, 1], mesh_dim_names=("pp",))),
        "no mesh": built("pp=2"),  # type: ignore[arg-type]
        "ranks": built(mesh, ranks=2),
        "two meshes": built(mesh if dist.get_rank() < 2 else turned),
        "two names": built(mesh if dist.get_rank() < 2 else named),
        "long": built(init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))),
        "cuda": built(mesh, device="meta"),
        "shapes": ran(half, memory_limit="1GiB"),
        "any shape": ran(half),
        "built differently": ran(
            own, lambda index: nn.Linear(WIDTH, WIDTH, bias=dist.get_rank() != 3)
        ),
    }


def saved(mesh: DeviceMesh, folder: Path) -> dict[str, bool]:
    """On 2 x 2, on a pipeline of 4, and in one process."""
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    return round_trip(
        lambda: trainer(mesh, stages=4, schedule="interleaved", **REFERENCE),
        lambda: trainer(stages=4, ranks=1, **REFERENCE),
        lambda step: share(replica_of(mesh), step),
        folder,
        by_stage,
        line=lambda: trainer(four, stages=4, **REFERENCE),
    )


def four_ranks(folder: Path) -> dict[str, Any]:
    """Cases on pp 2 x dp_replicate 2, and the other order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    found: dict[str, Any] = {
        name: exactness(turned if name == "fused" else mesh, stages, **options)
        for name, (stages, options) in EXACT.items()
    }
    alone = exactness(flat, 2, **REFERENCE)
    whole = nn.Sequential(*(block(index) for index in range(2)))
    planning = {"costs": "estimate"}
    options = {"example": torch.zeros(ROWS // M, WIDTH), "planning": planning}
    with trainer(mesh, whole, **options) as made:
        seen = made.forward_backward(share(replica_of(mesh)))
    found["whole"] = seen.tolist() == by_hand(block, 2, 2)[1][replica_of(mesh)]
    found["no pipeline"] = {"losses": alone["losses"]}  # four numbers are added in some order
    found["reductions"] = once_each(mesh)
    found["under way"] = under_way(mesh)
    found["also"] = also(mesh)
    found["refused"] = refused(mesh)
    found["saved"] = saved(mesh, folder)
    return found


def with_a_death(folder: Path) -> None:
    """Rank 3 is killed in a step; the others leave what they saw in a folder."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))

    def build(index: int) -> nn.Module:
        module = block(index)
        if dist.get_rank() == 3:
            module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return module

    try:
        with trainer(mesh, build, **REFERENCE) as made:
            made.step(share(replica_of(mesh)))
    except AutosplitError as error:
        (folder / f"{dist.get_rank()}.txt").write_text(str(error))
        raise
