"""Helpers of the mesh tests: a small pipeline, its results in one process, checkpoints."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable
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
from autosplit.pipeline import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped
from tests.zoo import Made

WIDTH, ROWS, M = 6, 8, 4
REFERENCE: dict[str, Any] = {"stage_factory": ReferenceStage}


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def place(mesh: DeviceMesh, *names: str) -> int:
    """Which of the shares along these dimensions, of those that the mesh has, is this rank's."""
    number = 0
    for name in names:
        if name in (mesh.mesh_dim_names or ()):
            number = number * mesh[name].size() + mesh.get_local_rank(name)
    return number


def block(index: int) -> nn.Module:
    """Stage ``index``, the same on every call."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def scale() -> nn.Module:
    return Made(lambda m, x: x * m.scale, scale=nn.Parameter(torch.full((1,), 1.5)))


def uneven(index: int) -> nn.Sequential:
    """Stage ``index``: an inner width and a scale that two ranks cannot divide."""
    torch.manual_seed(index)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)),
        nn.LayerNorm(WIDTH),
        scale(),
    )


def share(replica: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """A replica's share of the batch."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(10 * step + replica)
    inputs, targets = torch.randn(2, ROWS, WIDTH, generator=generator)
    return inputs.clone(), targets.clone()


def number_of(mesh: DeviceMesh) -> int:
    """The number of this rank's share of the batch."""
    return place(mesh, "dp_replicate", "dp_shard", "cp")


def share_of(mesh: DeviceMesh, step: int = 0) -> tuple[Tensor, Tensor]:
    return share(number_of(mesh), step)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def trainer(
    mesh: DeviceMesh | None = None, build: Any = block, stages: int | None = 2, **options: Any
) -> PipelineTrainer:
    options = {"microbatches": M, "timeout": 60.0, **options}
    return PipelineTrainer(
        build,
        options.pop("loss_fn", F.mse_loss),
        options.pop("optimizer_fn", adam),
        stages=stages,
        mesh=mesh,
        **grouped(**options),
    )


def of_shares(
    model: nn.Module, shares: Iterable[tuple[Tensor, Tensor]], loss_fn: Any
) -> tuple[list[list[float]], dict[str, Tensor], float]:
    """Train on each share of a batch in eager mode, microbatch by microbatch. Return the losses by
    share, the mean gradients, whole, and their norm.
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
) -> tuple[list[list[float]], dict[str, Tensor], float]:
    """The same of the whole model in one process."""
    model = nn.Sequential(*(build(index) for index in range(stages)))
    return of_shares(model, map(share, range(replicas)), F.mse_loss)


def whole(tensor: Any) -> Tensor:
    output: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return output


def norm_of(grads: Iterable[Tensor]) -> float:
    """The norm of gradients, with one rounding behind the squares' and one behind their sum."""
    squares = (g.double().square().flatten().tolist() for g in grads)
    return math.sqrt(math.fsum(itertools.chain.from_iterable(squares)))


Names = Callable[[int, str], str]


def by_stage(stage: int, name: str) -> str:
    return f"{stage}.{name}"


def gradients_of(engine: PipelineTrainer, names: Names = by_stage) -> dict[str, Tensor]:
    """This rank's gradients, whole, by name; each lies over ranks as its parameter does."""
    results = {}
    for stage, gradients in engine.gradients().items():
        parameters = dict(engine.modules[stage].named_parameters())
        for name, gradient in gradients.items():
            for subject in ("placements", "device_mesh"):
                assert getattr(gradient, subject, None) == getattr(
                    parameters[name], subject, None
                ), name
            results[names(stage, name)] = whole(gradient)
    assert results
    return results


def assert_step(
    engine: PipelineTrainer,
    batch: tuple[Tensor, Tensor],
    expected: tuple[list[float], dict[str, Tensor], float],
    names: Names = by_stage,
    *,
    exact: Callable[[str], bool] = lambda name: True,
) -> None:
    """A step's losses, gradients and norm are as expected, bit for bit; gradients that are not
    exact, and the norm of any such, but for rounding.
    """
    losses, gradients, norm = expected
    assert engine.forward_backward(batch).tolist() == losses
    for name, gradient in gradients_of(engine, names).items():
        if exact(name):
            assert torch.equal(gradient, gradients[name]), name
        else:
            torch.testing.assert_close(gradient, gradients[name])
    assert math.isclose(engine.grad_norm or 0.0, norm, rel_tol=1e-6)


def assert_skipped(engine: PipelineTrainer, batch: tuple[Tensor, Tensor], *, bad: bool) -> None:
    """A step moves no parameter on any rank, if only some are given an infinite target."""
    inputs, targets = batch
    earlier = [
        p.detach().clone() for module in engine.modules.values() for p in module.parameters()
    ]
    engine.step(inputs, torch.where(torch.tensor(bad), math.inf, targets))
    after = [p for module in engine.modules.values() for p in module.parameters()]
    assert all(map(torch.equal, map(whole, earlier), map(whole, after)))
    assert engine.metrics()["skipped"] == 1
    assert not any(engine.gradients().values())


def refusal(act: Callable[[], Any]) -> str:
    """Return the error's text, or ``"accepted"``."""
    try:
        act()
    except AutosplitError as error:
        return str(error)
    return "accepted"


def assert_refused(cases: Iterable[tuple[str, Callable[[], Any]]]) -> None:
    for message, act in cases:
        result = refusal(act)
        assert message in result, result


# --- checkpoints ----------------------------------------------------------------------------------

Make = Callable[[], PipelineTrainer]


def common_folder() -> Path:
    """The same on all ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def state(engine: PipelineTrainer, names: Names) -> dict[str, Tensor]:
    """Whole parameters, and what the optimizer has of them."""
    results = {}
    for stage, module in engine.modules.items():
        for name, parameter in module.named_parameters():
            values = {"": parameter.detach(), **engine.optimizer.state[parameter]}
            key = names(stage, name)
            results |= {f"{key} {subject}": whole(item).clone() for subject, item in values.items()}
    return results


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return bool(one) and all(torch.equal(one[key], other[key]) for key in one)


def assert_round_trip(
    make: Make,
    alone: Make,
    batch: Callable[[int], Any],
    names: Names = by_stage,
    *,
    local: Names | None = None,
    line: Make | None = None,
    **saving: Any,
) -> Path:
    """Train on a mesh, save, and go on there, on a ``line`` of ranks, in one process, and back.
    Where it was saved.
    """
    folder, local = common_folder(), local or names
    with make() as engine:
        engine.step(batch(0))
        save_checkpoint(engine, folder / "mesh", names=names, step=7, **saving)
        earlier = state(engine, names)
        engine.step(batch(1))
        after = state(engine, names)
        loaded = load_checkpoint(engine, folder / "mesh", names=names)
        assert (loaded.step, loaded.generators) == (7, "continued")
        assert same(earlier, state(engine, names))
        engine.step(batch(1))  # with the random numbers of before
        assert same(after, state(engine, names))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, earlier)
        union = {key: value for item in everywhere for key, value in item.items()}
        read = {f"{key} ": item for key, item in read_checkpoint(folder / "mesh").items()}
        assert same(read, union)
        assert len(read) == sum(key[-1] == " " for key in union)
        if line is not None:
            with line() as other:
                load_checkpoint(other, folder / "mesh", names=local, generators=False)
                assert same(state(other, local), union)
        mine = None
        if dist.get_rank() == 0:  # the others would do the same
            with alone() as other:
                load_checkpoint(other, folder / "mesh", names=local, generators=False)
                mine = state(other, local)
                assert same(mine, union)
                assert mine.keys() == union.keys()
                other.step(batch(0))
                mine = state(other, local)
                save_checkpoint(other, folder / "alone", names=local)
        dist.all_gather_object(everywhere, mine)
        load_checkpoint(engine, folder / "alone", names=names)
        assert same(state(engine, names), everywhere[0])
    return folder / "mesh"
