"""Stages that fully_shard has sharded, under torch's schedules: four Gloo ranks, pp 2 x dp 2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules

import autosplit
from autosplit.pipeline import build
from autosplit.pipelining import SplitPipelineStage, dw_builder, torch_schedule
from tests.ranks import ranks
from tests.sharded.models import Model
from tests.sharded.test_split import Pair, local, raised, reductions, sharded

from .programs import CPU, V_SHAPED, mean_square


class Part(nn.Module):
    """Two blocks, and a layer whose rows do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        make = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)]
        self.blocks = nn.ModuleList(make)
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        made: Tensor = self.last(x)
        return made * 1


class Pipelines:
    """A model in stages on two pipelines, each of which takes a share of the batch.

    Args:
        kind: the schedule, a class of torch's.
        stages: how many.
        microbatches: how many.
        shard: shards a stage.
        stage: makes a stage.
        make: makes the schedule, where it is no class of torch's.
        late: whether modules are sharded when their stages are there.
        scale: whether gradients are divided by the number of microbatches.
    """

    def __init__(
        self,
        kind: str = "Schedule1F1B",
        stages: int = 2,
        microbatches: int = 4,
        *,
        shard: Callable[..., nn.Module] = sharded,
        stage: Any = SplitPipelineStage,
        make: Callable[..., Any] | None = None,
        late: bool = False,
        scale: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self.ranks, self.replicas = mesh["pp"], mesh["dp"]
        self.parts = [Part() for _ in range(stages)]
        self.plain = copy.deepcopy(self.parts)
        self.mine = _held(self.ranks, kind, stages)
        self.count, self.scale = microbatches, scale

        def shard_all() -> None:
            for at in self.mine:
                shard(self.parts[at], mesh=self.replicas, **options)

        if not late:
            shard_all()
        group = self.ranks.get_group()
        self.stages = [stage(self.parts[at], at, stages, CPU, group=group) for at in self.mine]
        if late:
            shard_all()
        found = getattr(schedules, kind) if make is None else make
        single = make is None and issubclass(found, schedules.PipelineScheduleSingle)
        given = self.stages[0] if single else self.stages
        self.schedule = found(given, microbatches, loss_fn=mean_square, scale_grads=scale)
        self.data = torch.Generator(torch.get_default_device()).manual_seed(1)
        self.losses: list[Tensor] = []

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of both replicas."""
        size = (2, 2 * self.count, 5)
        return torch.randn(size, generator=self.data), torch.randn(size, generator=self.data)

    def step(self, inputs: Tensor, targets: Tensor, run: str = "step") -> None:
        mine, self.losses = self.replicas.get_local_rank(), []
        given = {"target": targets[mine], "losses": self.losses} if self.last else {}
        getattr(self.schedule, run)(*((inputs[mine],) if 0 in self.mine else ()), **given)

    @property
    def last(self) -> bool:
        return len(self.parts) - 1 in self.mine

    def plain_step(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """The same in one process, both replicas: the losses of this rank's."""
        parameters = [p for part in self.plain for p in part.parameters()]
        earlier, sums, mine = [p.grad for p in parameters], [], []
        for replica in range(2):
            for p in parameters:
                p.grad = None
            pairs = zip(
                inputs[replica].tensor_split(self.count),
                targets[replica].tensor_split(self.count),
                strict=True,
            )
            losses = [mean_square(nn.Sequential(*self.plain)(x), y) for x, y in pairs]
            for loss in losses:
                loss.backward()
            sums.append([p.grad for p in parameters])
            mine = losses if replica == self.replicas.get_local_rank() else mine
        for p, one, other, before in zip(parameters, *sums, earlier, strict=True):
            p.grad = (one + other) / 2 / (self.count if self.scale else 1)
            p.grad = p.grad if before is None else before + p.grad
        return mine

    def differences(self) -> list[str]:
        found = []
        for at in self.mine:
            pairs = zip(self.parts[at].named_parameters(), self.plain[at].parameters(), strict=True)
            for (name, mine), other in pairs:
                whole = local(mine.grad)
                if not torch.equal(whole, other.grad) or type(mine).__name__ != "DTensor":
                    worst = (whole - other.grad).abs().max()
                    found.append(f"{type(mine).__name__} {name} of stage {at}: {worst}")
        return found

    def train(self, steps: int = 2) -> list[str]:
        """Some steps, whose gradients add up; what differs, and reductions that are too many."""
        found = []
        for _ in range(steps):
            batch = self.batch()
            with reductions() as seen:
                self.step(*batch)
            plain = self.plain_step(*batch)
            found += self.differences()
            if len(seen) != 3 * len(self.mine):  # two blocks and the rest, of each stage
                found.append(f"reduced {seen}")
            if self.last and not all(map(torch.equal, plain, self.losses)):
                found.append(f"losses {self.losses} instead of {plain}")
            if any(group.is_unsharded for group in self.groups()):
                found.append("left gathered")
        return found

    def groups(self) -> list[Any]:
        return [g for stage in self.stages for g in stage.sharding.groups]


def _held(ranks: DeviceMesh, kind: str, stages: int) -> Sequence[int]:
    rank = ranks.get_local_rank()
    if kind in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, 2))


SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "Schedule1F1B": (2, {"scale": False, "reshard_after_forward": True}),
    "ScheduleInterleaved1F1B": (8, {}),  # frees and gathers stages between F and I
    "ScheduleInterleavedZeroBubble": (2, {"reshard_after_forward": False}),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@ranks(4)
def test_gradients_are_those_of_one_process(kind: str) -> list[str]:
    stages, more = SCHEDULES[kind]
    return Pipelines(kind, stages, **more).train()


@ranks(4)
def test_a_schedule_of_ours() -> list[str]:
    def make(stages: Any, microbatches: int, **options: Any) -> Any:
        found = build("v-half", 4, microbatches, ranks=2)
        return torch_schedule(found, stages, options.pop("loss_fn"), **options)

    return Pipelines("ScheduleZBVZeroBubble", 4, make=make, late=True).train(1)


@ranks(4)
def test_evaluation_and_then_training() -> list[str]:
    pipelines, found = Pipelines("ScheduleDualPipeV", 4), []
    batch = pipelines.batch()
    pipelines.step(*batch, run="eval")
    plain = pipelines.plain_step(*batch)
    if pipelines.last and not all(map(torch.equal, plain, pipelines.losses)):
        found.append(f"losses {pipelines.losses} instead of {plain}")
    if any(group.is_unsharded for group in pipelines.groups()):
        found.append("left gathered")
    for part in pipelines.plain:
        part.zero_grad()
    return found + pipelines.train(1)


@ranks(4)
def test_two_dimensions_of_data_parallelism() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return Pair(lambda model: sharded(model, mesh=mesh), model=Model(blocks=1)).train()


@ranks(4)
def test_freed_to_a_smaller_mesh() -> list[str]:
    return Pair(partial(sharded, reshard_after_forward=2), model=Model(blocks=1)).train()


@ranks(4)
def test_torchs_stage_around_a_split_module() -> list[str]:
    text = raised(lambda: dw_builder(autosplit.split(fully_shard(nn.Linear(4, 4)))))
    return [] if "SplitPipelineStage" in text else [text]
