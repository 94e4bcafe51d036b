"""What ranks that share the tensors of stages run in tests, and the models they train."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from autosplit import CollectiveCosts, DeviceSpeed, Link
from autosplit.checkpoint import read_checkpoint
from autosplit.pipeline import PipelineTrainer
from tests.mesh.workers import adam, of_shares, refusal, round_trip, same, whole
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped
from tests.ranks import forget_meshes

WIDTH, ROWS, LENGTH, WORDS, M = 4, 8, 4, 8, 4
FEW, MANY = 2, 4  # blocks of a model, which may be cut into as many stages


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.dropout(self.up(self.norm(x)).tanh()))
        return found


def stage_of(index: int, stages: int, count: int = FEW) -> nn.Sequential:
    """Stage ``index`` of a model that is the same however it is cut, in one process."""
    blocks = []
    for number in range(index * count // stages, (index + 1) * count // stages):
        torch.manual_seed(number)
        blocks.append(Block())
    if index == stages - 1:
        blocks.append(nn.Linear(WIDTH, WORDS, bias=False))
    return nn.Sequential(*blocks)


def parallel(mesh: DeviceMesh, stages: int, count: int = FEW) -> Callable[[int], nn.Module]:
    """The same with its tensors shared: activations between the products lie along the sequence,
    also where they go from stage to stage, and the logits along the words.
    """

    def build(index: int) -> nn.Module:
        module = stage_of(index, stages, count)
        plan: dict[str, Any] = {}
        for at, part in enumerate(module):
            if isinstance(part, Block):
                plan |= {
                    f"{at}.norm": SequenceParallel(),
                    f"{at}.up": ColwiseParallel(input_layouts=Shard(1)),
                    f"{at}.down": RowwiseParallel(output_layouts=Shard(1)),
                }
            else:
                plan[str(at)] = ColwiseParallel(
                    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
                )
        if index == 0:
            plan[""] = PrepareModuleInput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(Shard(1),),
                use_local_output=True,
            )
        whole = plan.pop("", None)
        found = parallelize_module(module, mesh["tp"], plan)
        return found if whole is None else parallelize_module(found, mesh["tp"], whole)

    return build


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def batch(replica: int = 0, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(10 * step + replica)
    inputs = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    return inputs, torch.randint(WORDS, (ROWS, LENGTH), generator=generator)


def trainer(
    mesh: DeviceMesh | None, stages: int, build: Any = None, **options: Any
) -> PipelineTrainer:
    options = {"microbatches": M, "timeout": 60.0, "max_grad_norm": 1e9, **options}
    if build is None:
        build = parallel(mesh, stages) if mesh is not None else lambda i: stage_of(i, stages)
    if mesh is not None and "stage_factory" not in options:
        options.setdefault("overlap", "collectives")  # nothing is measured, which takes a second
    loss_fn = options.pop("loss_fn", loss_of)
    return PipelineTrainer(
        build,
        loss_fn,
        adam,
        stages=stages,
        mesh=mesh,
        **grouped(**options),
    )


def coordinate(mesh: DeviceMesh, name: str) -> int:
    return mesh.get_local_rank(name) if name in (mesh.mesh_dim_names or ()) else 0


class Reference:
    """Eager mode's losses and gradients of the same modules in one stage, tensors shared alike."""

    def __init__(self, mesh: DeviceMesh, count: int = FEW) -> None:
        self._count = count
        replicas = mesh["dp_replicate"].size() if "dp_replicate" in mesh.mesh_dim_names else 1
        with loss_parallel():
            self.losses, self.gradients, self.norm = of_shares(
                parallel(mesh, 1, count)(0).eval(), map(batch, range(replicas)), loss_of
            )

    def agrees(self, made: PipelineTrainer, stages: int) -> bool:
        """Whether a trainer's gradients are these, bit for bit, and lie as their parameters do."""
        equal = []
        for stage, gradients in made.gradients().items():
            parameters = dict(made.modules[stage].named_parameters())
            for name, gradient in gradients.items():
                at, _, own = name.partition(".")
                expected = self.gradients[f"{int(at) + stage * self._count // stages}.{own}"]
                lies = getattr(parameters[name], "placements", None)
                equal.append(getattr(gradient, "placements", None) == lies)
                equal.append(torch.equal(whole(gradient), expected))
        return bool(equal) and all(equal)


def still(build: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Without dropout."""
    return lambda index: build(index).eval()


def not_a_number(made: PipelineTrainer, given: tuple[Tensor, Tensor]) -> str:
    """What a step says of a gradient that is no number in one rank's part of a parameter."""
    if dist.get_rank() == 3:
        (module,) = made.modules.values()
        weight: Any = module.get_parameter("0.up.weight")
        with torch.no_grad():
            weight.to_local()[0, 0] = math.nan
    losses = made.forward_backward(given)
    return f"{made.grad_norm} {losses.isnan().all().item()}"


SLOW = CollectiveCosts(Link(1.0), DeviceSpeed(1e12, 1e11))

EXACT: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1f1b": (2, FEW, {"memory": 500, "accumulation": "exact", "weights": "2bp"}),
    "zb-v": (4, MANY, {"schedule": "zb-v", "memory": "lean", "overlap": SLOW}),
}
"""Stages, blocks, and options."""


def exactness(mesh: DeviceMesh, references: dict[int, Reference], case: str) -> dict[str, Any]:
    """A step's losses, gradients and norm against eager mode."""
    stages, count, options = EXACT[case]
    reference = references[count]
    build = still(parallel(mesh, stages, count))
    with loss_parallel(), trainer(mesh, stages, build, **options) as made:
        replica = coordinate(mesh, "dp_replicate")
        seen = made.forward_backward(batch(replica)).tolist()
        found = {
            "losses": seen == reference.losses[replica],
            "gradients": reference.agrees(made, stages),
            "norm": made.grad_norm == reference.norm,
        }
        if case == "1f1b":
            found["nan"] = not_a_number(made, batch(replica))
        return found


class Weather(nn.Module):
    """A block that is bad on one rank, in what the stage does with its second microbatch."""

    def __init__(self, block: nn.Module, act: Callable[[], None]) -> None:
        super().__init__()
        self.block = block
        self._act, self._calls = act, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Weather:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 3:  # building the stage runs the module once
            self._act()
        found: Tensor = self.block(x)
        return found


def bad_weather(mesh: DeviceMesh, act: Callable[[], None]) -> Any:
    """A trainer's step in which rank 3 does ``act`` while rank 2 waits for its part of tensors."""

    def build(index: int) -> nn.Module:
        module = parallel(mesh, 2)(index)
        module[0].up = Weather(module[0].up, act if dist.get_rank() == 3 else lambda: None)
        return module

    with loss_parallel(), trainer(mesh, 2, build, stage_factory=ReferenceStage) as made:
        made.step(batch())


def fail() -> None:
    raise ValueError("bad weather")


def new_mesh(second: str = "tp") -> DeviceMesh:
    forget_meshes()  # waits on the groups of one may have ended
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", second))


def refused() -> dict[str, str]:
    """What is said to bad stages and batches, on this rank."""
    rank = dist.get_rank()

    def ran(build: Any, given: Any = new_mesh, batches: int = 1, **options: Any) -> str:
        mesh = new_mesh()  # a trainer that ends takes the waits on its mesh with it

        def act() -> None:
            whose = mesh if given is new_mesh else given()
            with loss_parallel(), trainer(whose, 2, build(mesh), **options) as made:
                made.step(batch(rank % batches))

        return refusal(act)

    def ours(mesh: DeviceMesh) -> Callable[[int], nn.Module]:
        return parallel(mesh, 2)

    def widened(mesh: DeviceMesh) -> Callable[[int], nn.Module]:
        wider = nn.Linear(WIDTH, WIDTH, bias=rank % 2 == 0)
        return lambda index: nn.Sequential(wider, parallel(mesh, 2)(index))

    def seeded(mesh: DeviceMesh) -> Callable[[int], nn.Module]:
        """Drops what all ranks have the whole of."""

        def build(index: int) -> nn.Module:
            layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS if index else WIDTH)
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            module = parallelize_module(nn.Sequential(*layers, nn.Dropout(0.5)), mesh["tp"], plan)
            torch.manual_seed(rank)
            return module

        return build

    def over_pipeline(mesh: DeviceMesh) -> Callable[[int], nn.Module]:
        plan = {"0.up": ColwiseParallel()}
        return lambda index: parallelize_module(stage_of(index, 2), mesh["pp"], plan)

    def handed_on(mesh: DeviceMesh) -> Callable[[int], nn.Module]:
        plan = {"1": ColwiseParallel(use_local_output=False)}
        return lambda index: parallelize_module(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)), mesh["tp"], plan
        )

    return {
        "over the pipeline": ran(over_pipeline),
        "no tp": ran(ours, lambda: new_mesh("dp_replicate")),
        "nothing shared": ran(lambda mesh: lambda index: stage_of(index, 2)),
        "other widths": ran(widened),
        "memory": ran(ours, memory="lean" if rank % 2 else "fast"),
        "other batches": ran(ours, batches=2, stage_factory=ReferenceStage),
        "other seeds": ran(seeded, stage_factory=ReferenceStage),
        "handed on": ran(handed_on),
    }


def saved(mesh: DeviceMesh, folder: Path) -> dict[str, bool]:
    """On 2 x 2, in one process, and by torch's loader; it is written while the next step runs."""

    def named(stage: int, name: str) -> str:
        at, _, own = name.partition(".")
        return f"{int(at) + stage * FEW // 2}.{own}"

    build = parallel(mesh, 2)
    with loss_parallel():
        found = round_trip(
            lambda: trainer(mesh, 2, build, max_grad_norm=0.5),
            lambda: trainer(None, 1, ranks=1, stage_factory=ReferenceStage),
            lambda step: batch(0, step),
            folder,
            named,
            own=lambda stage, name: name,
            asynchronous=True,
        )
    torchs = {"model": parallel(mesh, 1)(0).state_dict()}
    load(torchs, checkpoint_id=folder / "mesh", process_group=mesh.get_group("tp"))
    loaded = {name: whole(each) for name, each in torchs["model"].items()}
    found["torch's loader"] = same(loaded, read_checkpoint(folder / "mesh"))
    return found


def four_ranks(folder: Path) -> dict[str, Any]:
    """Cases on pp 2 x tp 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    references = {count: Reference(mesh, count) for count in (FEW, MANY)}
    found: dict[str, Any] = {
        case: exactness(turned if case == "zb-v" else mesh, references, case) for case in EXACT
    }
    found["saved"] = saved(mesh, folder)
    found["refused"] = refused()
    return found


def failing() -> str:
    """What is heard of a rank that fails. Torch knows meshes of the same ranks as one, so that its
    groups, whose waits have ended, are of no more use to these processes.
    """
    return refusal(lambda: bad_weather(new_mesh(), fail))
