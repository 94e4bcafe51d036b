"""What ranks of a mesh run in tests, and the models they train."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.errors import AutosplitError
from autosplit.pipeline import PipelineTrainer

WIDTH, ROWS, M = 6, 8, 4
Grid = Sequence[Sequence[int]]


def block(index: int) -> nn.Module:
    """Stage ``index``, the same on every call."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def share(replica: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """A replica's share of the batch."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def trainer(
    mesh: DeviceMesh | None, build: Any = block, stages: int | None = 2, **options: Any
) -> PipelineTrainer:
    options = {"microbatches": M, "timeout": 60.0, **options}
    loss_fn = options.pop("loss_fn", F.mse_loss)
    return PipelineTrainer(
        build, loss_fn, options.pop("optimizer_fn", adam), stages=stages, mesh=mesh, **options
    )


def replica_of(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank("dp_replicate") if "dp_replicate" in names else 0


def by_hand(
    build: Callable[[int], nn.Module], stages: int, replicas: int, steps: int = 1, **kwargs: Any
) -> tuple[nn.Sequential, list[list[float]], float]:
    """Plain autograd in one process: the mean of what each replica's share gives.

    Returns:
        The model with the gradients of the last step in ``.grad``, the losses of that step by
        replica, and the norm of those gradients.
    """
    model = nn.Sequential(*(build(index) for index in range(stages)))
    optimizer = kwargs.get("optimizer_fn", adam)(list(model.parameters()))
    losses: list[list[float]] = []
    norm = 0.0
    for step in range(steps):
        sums: list[list[Tensor | None]] = []
        losses = []
        for replica in range(replicas):
            inputs, targets = share(replica, step)
            model.zero_grad(set_to_none=True)
            losses.append([])
            for x, y in zip(inputs.chunk(M), targets.chunk(M), strict=True):
                loss = F.mse_loss(model(x), y)
                (loss / M).backward()
                losses[-1].append(loss.item())
            sums.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *sums, strict=True):
            there = [part for part in parts if part is not None]
            parameter.grad = None if not there else sum(there[1:], there[0]) / replicas
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in grads]
        norm = math.sqrt(math.fsum(squares))
        if step + 1 < steps:
            optimizer.step()
    return model, losses, norm


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
        if tensor.dtype != torch.float64:  # which are losses and norms
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


EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {}),
    "fused": (2, {"split_backward": False}),
    "gpipe": (2, {"schedule": "gpipe"}),
    "interleaved": (4, {"schedule": "interleaved"}),
    "zb-v": (4, {"schedule": "zb-v"}),
    "slices": (2, {"slices": 2}),
    "early": (2, {"early_weights": True, "slices": 2}),
    "small buckets": (4, {"schedule": "interleaved", "bucket_cap_mb": 1e-4}),
    "lean": (2, {"memory": "lean"}),
}


def four_ranks(folder: Path) -> dict[str, Any]:
    """Cases on pp 2 x dp_replicate 2, and the other order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    found: dict[str, Any] = {
        name: exactness(mesh, stages, **options) for name, (stages, options) in EXACT.items()
    }
    found["turned"] = exactness(turned, 2)
    return found
