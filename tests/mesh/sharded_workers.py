"""What ranks of a mesh run in test_sharded.py: pipelines of stages that are sharded."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from autosplit.pipeline import build
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from tests.pipeline.reference_stage import ReferenceStage

from .workers import WIDTH, M, by_hand, by_stage, norm_of, refusal, round_trip, share, trainer

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def uneven(index: int) -> nn.Module:
    """Stage ``index``: an inner width and a scale that two ranks cannot divide."""
    torch.manual_seed(index)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)),
        nn.LayerNorm(WIDTH),
        Scale(),
    )


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class NoNaN(nn.Module):
    """Fails where there is one, in its graph, too."""

    def forward(self, x: Tensor) -> Tensor:
        beyond = x.isnan().any() * WIDTH
        return x.index_select(-1, torch.arange(WIDTH) + beyond)


def over(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a mesh that ``fully_shard`` is given."""
    names = mesh.mesh_dim_names or ()
    both = "dp_replicate" in names
    found: DeviceMesh = mesh["dp_replicate", "dp_shard"] if both else mesh["dp_shard"]
    return found


def sharded(
    mesh: DeviceMesh, build: Callable[[int], nn.Module] = uneven, /, **options: Any
) -> Callable[[int], nn.Module]:
    """Builds stages in two groups each."""

    options = {"mesh": over(mesh), **options}

    def stage(index: int) -> nn.Module:
        module: Any = build(index)
        fully_shard(module[0], **options)
        made: nn.Module = fully_shard(module, **options)
        return made

    return stage


def share_of(mesh: DeviceMesh, step: int = 0) -> tuple[Tensor, Tensor]:
    return share(number_of(mesh), step)


def number_of(mesh: DeviceMesh) -> int:
    number = 0
    names = mesh.mesh_dim_names or ()
    for name in ("dp_replicate", "dp_shard"):
        if name in names:
            number = number * mesh.size(names.index(name)) + mesh.get_local_rank(name)
    return number


def shares(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size() // (mesh.size(names.index("pp")) if "pp" in names else 1)


def whole(found: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{at}.{name}": each.full_tensor() for at, n in found.items() for name, each in n.items()
    }


@contextlib.contextmanager
def collectives() -> Iterator[Counter[str]]:
    """How many all-gathers and reduce-scatters of FSDP's start inside."""
    kinds = (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter)
    found: Counter[str] = Counter()
    originals = [kind.__call__ for kind in kinds]

    def counting(kind: Any, original: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            found[kind.__name__] += 1
            return original(*args, **kwargs)

        return called

    for kind, original in zip(kinds, originals, strict=True):
        kind.__call__ = counting(kind, original)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.__call__ = original  # type: ignore[method-assign]


# --- cases of four ranks --------------------------------------------------------------------------


def exactness(mesh: DeviceMesh, stages: int, **options: Any) -> dict[str, bool]:
    """A step's losses, gradients, norm and evaluation, held against autograd in one process."""
    sharding, gathers = options.pop("sharding", {}), options.pop("gathers", 1)
    model, losses, norm = by_hand(uneven, stages, shares(mesh))
    with trainer(mesh, sharded(mesh, **sharding), stages, max_grad_norm=1e9, **options) as made:
        with collectives() as counted:
            seen = made.forward_backward(share_of(mesh))
        again = made.evaluate(share_of(mesh))
        expected = dict(model.named_parameters())
        mine = whole(made.gradients())
        local = [p for module in made.modules.values() for p in module.parameters()]
        groups = 2 * len(made.modules)
        return {
            "losses": seen.tolist() == losses[number_of(mesh)],
            "evaluation": again.tolist() == losses[number_of(mesh)],
            "gradients": all(torch.equal(g, expected[name].grad) for name, g in mine.items()),
            "all of them": len(mine) == len(local),
            "norm": made.grad_norm == norm,
            "one reduction a group": counted["DefaultReduceScatter"] == groups,
            # Of the stage's first group, and of its root: to be captured, and to be run.
            "gathered": counted["DefaultAllGather"] == (1 + gathers) * groups,
        }


EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "fused": (2, {"split_backward": False, "sharding": {"reshard_after_forward": False}}),
    "zb-v": (
        4,
        {"schedule": "zb-v", "memory": "lean", "sharding": {"reshard_after_forward": True}},
    ),
}


def gathering_always() -> Schedule:
    """1F1B in which a stage is whole for one action at a time."""
    schedule = build("1f1b", 2, M)

    def around(action: Action) -> Iterator[Action]:
        yield Action(action.stage, ActionKind.UNSHARD, 0)
        yield action
        yield Action(action.stage, ActionKind.RESHARD, 0)

    rows = tuple(tuple(each for a in row for each in around(a)) for row in schedule.ranks)
    return replace(schedule, ranks=rows)


def replicated(mesh: DeviceMesh) -> dict[str, bool]:
    """Shards that have copies: four numbers are added in some order."""
    model, losses, norm = by_hand(uneven, 2, 4)
    with trainer(mesh, sharded(mesh), max_grad_norm=1e9) as made:
        seen = made.forward_backward(share_of(mesh))
        mine = whole(made.gradients())
        expected = dict(model.named_parameters())
        return {
            "losses": seen.tolist() == losses[number_of(mesh)],
            "gradients": all(torch.allclose(g, expected[k].grad) for k, g in mine.items()),
            "norm": made.grad_norm == norm_of(mine.values()) and abs(made.grad_norm - norm) < 1e-6,
        }


def _in_float32(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)  # torch 2.11 has no loss of two dtypes


def half(mesh: DeviceMesh) -> dict[str, bool]:
    """Microbatches' gradients of bfloat16 are added up, and reduced, in float32."""
    model = nn.Sequential(*(uneven(index) for index in range(2))).bfloat16()
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for replica in range(2):
        own = {name: torch.zeros_like(total) for name, total in sums.items()}
        for x, y in zip(*(each.chunk(M) for each in share(replica)), strict=True):
            model.zero_grad()
            (_in_float32(model(x.bfloat16()), y) / M).backward()
            for name, p in model.named_parameters():
                own[name] += p.grad
        for name, total in own.items():
            sums[name] += total / 2
    with trainer(mesh, sharded(mesh, mp_policy=HALF), loss_fn=_in_float32) as made:
        made.forward_backward(share_of(mesh))
        mine = whole(made.gradients())
    return {"gradients": all(torch.equal(each, sums[name]) for name, each in mine.items())}


def training(mesh: DeviceMesh) -> dict[str, bool]:
    """Three clipped steps, of which two are taken early, held against one process."""

    def slow(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    model = nn.Sequential(uneven(0), uneven(1))
    optimizer = slow(list(model.parameters()))
    norm = 0.0
    for _ in range(3):
        reference, _, norm = by_hand(lambda i: _copy(model[i]), 2, 2)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine.grad = theirs.grad
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.5, torch.tensor(norm))
        optimizer.step()
    expected = dict(model.named_parameters())
    with trainer(mesh, sharded(mesh), optimizer_fn=slow, max_grad_norm=0.5) as made:
        for step in (made.step_async, made.step_async, made.step):
            step(share_of(mesh))
        values = whole({at: dict(m.named_parameters()) for at, m in made.modules.items()})
        same = all(torch.equal(each, expected[name]) for name, each in values.items())
        return {"weights": same, "norm": made.grad_norm == norm}


def _copy(module: nn.Module) -> nn.Module:
    made = uneven(0)
    made.load_state_dict(module.state_dict())
    return made


def also(mesh: DeviceMesh) -> dict[str, Any]:
    """Steps accumulate; buffers and the timeline; parameters are freed between steps; what is not a
    number on one rank is none on all; and the modules can be used without the trainer, too.
    """
    found: dict[str, Any] = {}
    own = share_of(mesh)
    with trainer(mesh, sharded(mesh), record=True, max_grad_norm=1.0) as made:
        made.forward_backward(own)
        once = whole(made.gradients())
        made.forward_backward(own)
        twice = whole(made.gradients())
        found["steps add up"] = all(torch.equal(each, 2 * once[k]) for k, each in twice.items())
        found["freed"] = all(
            type(p.data).__name__ == "DTensor"
            for m in made.modules.values()
            for p in m.parameters()
        )
        ran = [span.action for span in made.timeline().spans if span.action.kind.is_whole]
        found["timeline"] = sorted(map(str, ran), key=lambda text: (text[1:] != "UNSHARD", text))
        made.step(own)
        more = tuple(torch.cat([each, each[:M]]) for each in own)
        found["another shape"] = made.forward_backward(more).equal(made.evaluate(more))
        nan = (own[0] * float("nan"), own[1]) if number_of(mesh) else own
        made.forward_backward(nan)
        bad = [bool(g.isnan().any()) for g in whole(made.gradients()).values()]
        found["nan"] = [str(made.grad_norm), all(bad)]
        modules = dict(made.modules)
    for module in modules.values():
        found["used alone"] = module(own[0]).shape == own[0].shape
    return found


def saved(mesh: DeviceMesh, folder: Path) -> dict[str, bool]:
    """On 2 x 2, and in one process."""
    return round_trip(
        lambda: trainer(mesh, sharded(mesh)),
        lambda: trainer(build=uneven, ranks=1, stage_factory=ReferenceStage),
        lambda step: share_of(mesh, step),
        folder,
        by_stage,
    )


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """What is said to bad sharding, on this rank."""
    own, plain = share_of(mesh), {"stage_factory": ReferenceStage}
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))

    def built(build: Any, made: DeviceMesh | None = mesh, **options: Any) -> str:
        return refusal(lambda: trainer(made, build, **options))

    def ran(build: Any, batch: Any = own, **options: Any) -> str:
        def act() -> None:
            with trainer(mesh, build, **options) as made:
                made.step(batch)

        return refusal(act)

    def wrongly(part: DeviceMesh | None) -> Any:
        return lambda index: fully_shard(uneven(index), mesh=part)

    def partly(index: int) -> nn.Module:
        module: Any = uneven(index)
        fully_shard(module[0], mesh=over(mesh))
        return module

    tied = [((0, "2.scale"), (1, "2.scale"))]

    def failing(index: int) -> nn.Module:
        return nn.Sequential(Scale(), *[NoNaN()] * index)

    def unreduced(index: int) -> nn.Module:
        module: Any = sharded(mesh)(index)
        module.set_requires_gradient_sync(False)
        made: nn.Module = module
        return made

    strange = tuple(each.clone() for each in own)
    if number_of(mesh):
        strange[0][2] = float("nan")  # of microbatch 1

    return {
        "plain": built(uneven),
        "partly": built(partly),
        "whole": built(nn.Linear(6, 6), example=own[0][:2]),
        "along pp": built(wrongly(mesh["pp"])),
        "all ranks": built(wrongly(None)),
        "no dimension": built(wrongly(pairs["dp_replicate"]), pairs),
        "no mesh": built(wrongly(None), None, stages=4),
        "shared": built(sharded(mesh), shared_parameters=tied),
        "limit": built(sharded(mesh), memory_limit="1GiB"),
        "no sync": ran(unreduced),
        "factory": ran(sharded(mesh), **plain),
        "failing": ran(sharded(mesh, failing), strange),
    }


def four_ranks(folder: Path) -> dict[str, Any]:
    """Cases on pp 2 x dp_shard 2, the other order, and dp_replicate 2 x dp_shard 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    found: dict[str, Any] = {
        name: exactness(turned if name == "fused" else mesh, stages, **options)
        for name, (stages, options) in EXACT.items()
    }
    always = {"schedule": gathering_always(), "gathers": 3 * M}
    found["always"] = exactness(mesh, 2, **always)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    found["another name"] = exactness(mesh, 2, sharding={"mesh": other["fsdp"]})
    found["replicated"] = replicated(flat)
    found["half"] = half(mesh)
    found["training"] = training(mesh)
    found["also"] = also(mesh)
    found["saved"] = saved(mesh, folder)
    found["refused"] = refused(mesh)
    return found
