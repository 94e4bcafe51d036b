"""Stages that fully_shard has sharded, under torch's schedules: four Gloo ranks, pp 2 x dp 2."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autosplit
from autosplit.pipeline import build
from autosplit.pipelining import SplitPipelineStage, dw_builder, torch_schedule
from tests.kept_ranks import ranks
from tests.sharded.models import Model
from tests.sharded.test_split import Pair, raised, reductions, sharded

from .programs import Make, Program, outputs_differ


class Part(nn.Module):
    """A block, and a layer whose rows do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.blocks = nn.ModuleList([block])
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        built: Tensor = self.last(x)
        return built * 1


class Replicated(Program):
    """Two pipelines, each of which takes a share of the batch.

    Args:
        kind: the schedule, a class of torch's.
        stages: how many.
        late: whether modules are sharded when their stages are there.
        scale: whether gradients are divided by the number of microbatches.
        make_schedule: see ``Program``.
        options: of the sharding.
    """

    def __init__(
        self,
        kind: str = "Schedule1F1B",
        stages: int = 2,
        *,
        late: bool = False,
        scale: bool = True,
        make_schedule: Make | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self.replicas = mesh["dp"]

        def stage(part: nn.Module, *given: Any, **more: Any) -> Any:
            local = part if late else sharded(part, mesh=self.replicas, **options)
            return SplitPipelineStage(local, *given, **more)

        super().__init__(
            [Part() for _ in range(stages)],
            kind,
            options={"group": mesh.get_group("pp")},
            schedule_options={"scale_grads": scale},
            make_schedule=make_schedule,
            stage=stage,
        )
        for at in self.mine if late else ():
            sharded(self.parts[at], mesh=self.replicas, **options)

    def beside(self, run: str = "step") -> list[str]:
        """Run a step here, and of both shares in one process. Return outputs that differ, groups
        that are still gathered, and surplus reductions.
        """
        with reductions() as seen:
            shares = [(torch.randn(8, 5), torch.randn(8, 5)) for _ in range(2)]
            local = self.replicas.get_local_rank()
            x, self.target = shares[local]
            self.args = [x]
            self.step(run)
        parameters = [p for part in self.plain for p in part.parameters()]
        earlier, sums, results = [p.grad for p in parameters], [], []
        for x, self.target in shares:
            self.args = [x]
            for p in parameters:
                p.grad = None
            results.append(self.plain_step())
            sums.append([p.grad for p in parameters])
        for p, one, other, initial in zip(parameters, *sums, earlier, strict=True):
            p.grad = (one + other) / 2 if initial is None else initial + (one + other) / 2
        result = outputs_differ(self.output, results[local]) if self.last else []
        groups = [g for stage in self.stages for g in stage.sharding.groups]
        if any(group.is_unsharded for group in groups):
            result.append("left gathered")
        if len(seen) != len(groups) * (run == "step"):
            result.append(f"reduced {seen}")
        return result

    def train(self, steps: int = 2) -> list[str]:
        """Some steps, whose gradients add up; what differs."""
        results = []
        for _ in range(steps):
            results += self.beside() + self.differences()
        mine = (p for at in self.mine for p in self.parts[at].parameters())
        return results + [f"{type(p)}" for p in mine if not isinstance(p.grad, DTensor)]


SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "Schedule1F1B": (2, {"scale": False, "reshard_after_forward": True}),
    "ScheduleInterleaved1F1B": (8, {}),  # frees and gathers stages between F and I
    "ScheduleInterleavedZeroBubble": (2, {"reshard_after_forward": False}),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@ranks(4)
def test_gradients_are_those_of_one_process(kind: str) -> list[str]:
    stages, more = SCHEDULES[kind]
    return Replicated(kind, stages, **more).train()


@ranks(4)
def test_a_schedule_of_ours() -> list[str]:
    def make(stages: Any, microbatches: int, **options: Any) -> Any:
        result = build("v-half", 4, microbatches, ranks=2)
        return torch_schedule(result, stages, options.pop("loss_fn"), **options)

    return Replicated("ScheduleZBVZeroBubble", 4, make_schedule=make, late=True).train(1)


@ranks(4)
def test_evaluation_and_then_training() -> list[str]:
    program = Replicated()
    result = program.beside("eval")
    for part in program.plain:
        part.zero_grad()
    return result + program.train(1)


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
