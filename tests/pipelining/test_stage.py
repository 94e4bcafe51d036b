"""SplitPipelineStage under torch's own schedules, on two Gloo ranks, beside plain autograd."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autosplit.pipeline import build
from autosplit.pipeline.validation.torch_csv import write_csv
from autosplit.pipelining import SplitPipelineStage, torch_schedule
from autosplit.torch_internals.version import TORCH
from tests.pipeline.training.test_missing_gradients import of_stages
from tests.pipeline.workers import WIDTH
from tests.ranks import ranks

from .programs import Program, block, mean_square, no_leaked_tensors


def of_blocks(stages: int, **more: Any) -> Program:
    parts = [block() for _ in range(stages)]
    return Program(parts, args=[torch.randn(8, 4)], target=torch.randn(8, 4), **more)


_UNSCALED: dict[str, Any] = {"schedule_options": {"scale_grads": False}}
SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "ScheduleLoopedBFS": (4, {"reverse": True, **_UNSCALED}),
    "ScheduleZBVZeroBubble": (4, {"microbatches": 8}),
    "ScheduleDualPipeV": (4, _UNSCALED),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@ranks(2)
def test_gradients_are_those_of_plain_autograd(kind: str) -> list[str]:
    stages, more = SCHEDULES[kind]
    program = of_blocks(stages, kind=kind, **more)
    found = program.run()
    with no_leaked_tensors():
        program.step()
    program.plain_step()
    return found + program.differences()


@ranks(2)
def test_products_that_add_into_the_sum() -> list[str]:
    program = of_blocks(
        2, kind="ScheduleInterleavedZeroBubble", options={"accumulation": "fused", "memory": "lean"}
    )
    found = program.run(2)
    return [each for each in found if not float(each.rpartition(" ")[2]) < 1e-6]


class Keyed(nn.Module):
    """Takes a mask and a number by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, *, mask: Tensor, power: int) -> Tensor:
        made: Tensor = self.inner(x * mask).pow(power)
        return made


@ranks(2)
def test_keyword_arguments() -> list[str]:
    program = Program(
        [Keyed() for _ in range(2)],
        "ScheduleInterleavedZeroBubble",
        args=[torch.randn(8, 4)],
        kwargs={"mask": torch.rand(8, 4).round(), "power": 2},
        target=torch.randn(8, 4),
    )
    return program.run()


class Several(nn.Module):
    """Hands on a tensor, a view of it, an input as it is, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        x, skip = values[0], values[-2] if len(values) > 2 else values[0]
        made = self.inner(x)
        if len(values) > 2:
            made = made + values[1].mT.sum() * values[-1]
        return made, made.mT, skip, made > 0


@ranks(2)
def test_several_outputs() -> list[str]:
    parts = [Several(), Several(), Several(), _Joined(block())]
    data = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4)}
    return Program(parts, "ScheduleZBVZeroBubble", **data).run()


@pytest.mark.parametrize(("kind", "stages"), [("Schedule1F1B", 2), ("ScheduleZBVZeroBubble", 4)])
@ranks(2)
def test_what_no_loss_depends_on_has_no_gradient(kind: str, stages: int) -> list[str]:
    data = {"args": [torch.randn(8, WIDTH)], "target": torch.randn(8, WIDTH)}
    return Program(of_stages(stages, 1), kind, **data).run(2)


@pytest.mark.parametrize("frozen", [0, 1])
@ranks(2)
def test_a_stage_that_is_frozen_for_some_steps(frozen: int) -> list[str]:
    program, found = of_blocks(2), []
    for trains in (True, False, True):
        for each in (program.parts[frozen], program.plain[frozen]):
            each.requires_grad_(trains)
        found += program.run()
        for part in [*program.parts, *program.plain]:
            part.zero_grad()
    return found


class _Joined(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, turned: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = self.inner(x * mask) + skip
        return made


class Named(nn.Module):
    """Hands on a dictionary, and takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, given: Any) -> dict[str, Any]:
        x = given["hidden"] if isinstance(given, dict) else given
        made = self.inner(x)
        return {"hidden": made, "parts": [made.sum(1), made[:, :2]]}


def named_loss(output: dict[str, Any], target: Tensor, weight: float = 2) -> Tensor:
    return weight * mean_square(output["hidden"], target) + output["parts"][0].square().mean()


@ranks(2)
def test_dictionaries_and_loss_kwargs() -> list[str]:
    program = Program(
        [Named() for _ in range(2)],
        "ScheduleInterleavedZeroBubble",
        args=[torch.randn(8, 4)],
        target=torch.randn(8, 4),
        loss=named_loss,
        loss_kwargs={"weight": 0.5} if TORCH >= (2, 13) else {},  # before, step() takes none
    )
    found = program.run()
    if program.last and set(program.output) != {"hidden", "parts"}:
        found.append(f"returned {program.output}")
    return found


@ranks(2)
def test_without_outputs_and_with_losses() -> list[str]:
    program = of_blocks(2)
    found = program.run(return_outputs=False)
    if program.output is not None:
        found.append("outputs were returned")
    if program.last and len(program.losses) != 4:
        found.append("losses are missing")
    return found


@ranks(2)
def test_without_a_loss_there_is_no_backward() -> list[str]:
    program = of_blocks(2, schedule_options={"loss_fn": None})
    output = program.schedule.step(*(program.args if 0 in program.mine else ()))
    if program.last:
        whole = torch.cat([program.plain_forward(at).detach() for at in range(4)])
        return [] if torch.equal(output, whole) else ["another output"]
    return []


@ranks(2)
def test_a_module_exchanged_before_the_first_step() -> list[str]:
    """As torchtitan does once it has parallelised it."""
    program = of_blocks(2)
    for at, stage in zip(program.mine, program.stages, strict=True):
        program.parts[at] = stage.submod = copy.deepcopy(stage.submod)  # type: ignore[index]
    return program.run()


@ranks(2)
def test_chunks_along_another_dimension() -> list[str]:
    program = Program(
        [_Turned(block()), block()],
        args=[torch.randn(4, 8)],
        target=torch.randn(8, 4),
        schedule_options={"args_chunk_spec": (TensorChunkSpec(1),)},
        cut=lambda tensor, count: tensor.tensor_split(count, 1),
    )
    return program.run()


class _Turned(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.mT)
        return made


@ranks(2)
def test_evaluation_before_and_after_training() -> list[str]:
    program = of_blocks(2, kind="ScheduleInterleavedZeroBubble")
    found = []
    for mode in (contextlib.nullcontext, torch.no_grad):
        with mode():
            losses: list[Tensor] = []
            given: dict[str, Any] = {"target": program.target} if program.last else {}
            if program.last:
                given["losses"] = losses
            output = program.schedule.eval(*(program.args if 0 in program.mine else ()), **given)
        if program.last:
            whole = torch.cat([program.plain_forward(at).detach() for at in range(4)])
            if not torch.equal(output, whole) or output.requires_grad or len(losses) != 4:
                found.append("evaluation differs")
        found += program.run()
    return found


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        made = checkpoint(self.first, x, use_reentrant=False)
        return self.second(made) + made


@ranks(2)
def test_activation_checkpointing() -> list[str]:
    parts = [Checkpointed() for _ in range(2)]
    data = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4)}
    return Program(parts, "ScheduleInterleavedZeroBubble", **data).run()


@pytest.mark.parametrize("frozen", [(0, 2), (3,)])
@ranks(2)
def test_frozen_stages(frozen: tuple[int, ...]) -> list[str]:
    parts = [block() for _ in range(4)]
    for at in frozen:
        parts[at].requires_grad_(False)
    data = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4)}
    return Program(parts, "ScheduleInterleavedZeroBubble", **data).run(2)


@dataclasses.dataclass
class Scale:
    by: Tensor


class Kept(nn.Module):
    """Takes an object by name, and leaves a loss of its own behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, *, scale: Scale) -> Tensor:
        made: Tensor = self.inner(x) * scale.by
        self.energy = made.square().mean()
        return made


@ranks(2)
def test_objects_by_name_and_losses_left_on_the_last_stage() -> list[str]:
    parts, rank, scale = [Kept(), Kept()], dist.get_rank(), Scale(torch.randn(4))
    plain = copy.deepcopy(parts)
    batch, target = torch.randn(8, 4), torch.randn(8, 4)

    def loss_of(last: Kept) -> Any:
        return lambda output, target: mean_square(output, target) + last.energy

    stage = SplitPipelineStage(parts[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_of(parts[1]), scale_grads=False)
    given: dict[str, Any] = {"target": target} if rank else {}
    schedule.step(*(() if rank else (batch,)), scale=scale, **given)
    for rows, wanted in zip(batch.chunk(4), target.chunk(4), strict=True):
        output = plain[1](plain[0](rows, scale=scale), scale=scale)
        loss_of(plain[1])(output, wanted).backward()
    pairs = zip(parts[rank].named_parameters(), plain[rank].parameters(), strict=True)
    return [name for (name, mine), other in pairs if not torch.equal(mine.grad, other.grad)]  # type: ignore[arg-type]


class Tied(nn.Module):
    """One weight twice, with a layer in between, and an output that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.between = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.two(torch.tanh(self.between(self.one(x))))
        return made.view(-1, 2, 2).flatten(1)


@ranks(2)
def test_tied_weights_and_views() -> list[str]:
    parts = [Tied() for _ in range(2)]
    data = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4)}
    return Program(parts, "ScheduleInterleavedZeroBubble", **data).run(2)


@ranks(2)
def test_a_weight_of_two_stages_of_one_rank() -> list[str]:
    """Torch's stages divide it twice."""
    parts = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    parts[3].weight, parts[2].weight = parts[0].weight, parts[1].weight
    program = Program(
        parts, "ScheduleZBVZeroBubble", args=[torch.randn(8, 4)], target=torch.randn(8, 4)
    )
    program.plain[3].weight, program.plain[2].weight = (  # type: ignore[assignment]
        program.plain[0].weight, program.plain[1].weight,
    )  # fmt: skip
    found = program.run(2)
    return [each for each in found if not float(each.rpartition(" ")[2]) < 1e-6]


@ranks(2)
def test_microbatches_of_two_sizes() -> list[str]:
    parts = [block() for _ in range(2)]
    data = {"args": [torch.randn(10, 4)], "target": torch.randn(10, 4)}
    return Program(parts, "ScheduleInterleavedZeroBubble", **data).run(2)


@ranks(2)
def test_buffers_see_microbatches_only() -> list[str]:
    parts = [nn.Sequential(block(), nn.BatchNorm1d(4)) for _ in range(2)]
    data = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4)}
    return Program(parts, "ScheduleInterleavedZeroBubble", **data).run(2)


@ranks(2)
def test_hooks_on_parameters() -> list[str]:
    """Each fires once for each microbatch, and sees what it sees in a loop of backwards."""
    options = {"scale_grads": False}
    program = of_blocks(2, kind="ScheduleInterleavedZeroBubble", schedule_options=options)
    seen: list[list[list[Tensor]]] = [[], []]
    for log, parts in zip(seen, (program.parts, program.plain), strict=True):
        for at in program.mine:
            weight = parts[at][0].weight  # type: ignore[index]
            grads: list[Tensor] = []
            sums: list[Tensor] = []
            weight.register_hook(lambda grad, grads=grads: grads.append(grad.clone()))
            weight.register_post_accumulate_grad_hook(
                lambda p, sums=sums: sums.append(p.grad.clone())
            )
            log += [grads, sums]
    found = program.run(2)
    for mine, theirs in zip(*seen, strict=True):
        if len(mine) != 8 or not all(map(torch.equal, mine, theirs)):
            found.append(f"hooks saw {len(mine)} gradients, and others than in a loop")
    return found


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        output *= self.scale  # into what the stage returned
        return mean_square(output, target)


@ranks(2)
def test_a_loss_that_writes_and_trains() -> list[str]:
    loss = Scaled()
    program = of_blocks(2, kind="ScheduleInterleavedZeroBubble", loss=loss)
    program.step()
    mine, loss.scale.grad = loss.scale.grad, None
    program.plain_step()
    found = program.differences()
    if program.last and not torch.equal(mine, loss.scale.grad):  # type: ignore[arg-type]
        found.append("gradient of the loss's parameter")
    return found


@ranks(2)
def test_gradients_of_what_the_caller_gave() -> list[str]:
    kwargs = {"mask": torch.rand(8, 4).requires_grad_(), "power": 2}
    program = Program(
        [Keyed() for _ in range(2)],
        args=[torch.randn(8, 4, requires_grad=True)],
        kwargs=kwargs,
        target=torch.randn(8, 4),
    )
    given = [*program.args, program.kwargs["mask"]]
    program.step()
    mine = [each.grad for each in given]
    for each in given:
        each.grad = None
    program.plain_step()
    found = program.differences()
    if 0 in program.mine and not torch.equal(mine[0], given[0].grad):
        found.append("gradient of the input")
    total = mine[1].clone()
    dist.all_reduce(total)
    if not torch.allclose(total, given[1].grad):
        found.append("gradient of the keyword argument")
    return found


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(nn.functional.relu(x, inplace=True))
        return made


@ranks(2)
def test_a_stage_that_writes_into_its_input() -> list[str]:
    parts = [block(), InPlace()]
    return Program(parts, args=[torch.randn(8, 4)], target=torch.randn(8, 4)).run(2)


@ranks(2)
def test_modules_that_change_between_steps() -> list[str]:
    parts = [nn.Sequential(block(), nn.Dropout(0.5)) for _ in range(2)]
    data = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4)}
    program = Program(parts, "ScheduleInterleavedZeroBubble", **data)
    program.step()
    for part in [*program.parts, *program.plain]:
        part.eval()
        part.zero_grad()
    return program.run(2)


@ranks(2)
def test_schedules_that_take_turns_with_the_same_stages() -> list[str]:
    program = of_blocks(2)
    found = program.run()
    first = program.schedule
    program.schedule = ScheduleGPipe(program.stages[0], 2, loss_fn=mean_square)
    program.microbatches = 2
    found += program.run()
    program.schedule, program.microbatches = first, 4
    return found + program.run()


@ranks(2)
def test_a_file_with_overlapping_actions() -> list[str]:
    path = Path(f"/tmp/autosplit-overlap-{dist.get_rank()}-{os.getpid()}.csv")
    path.write_text(
        "0F0,0F1,,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,,0B2,,0I3,0W3\n"
        ",1F0,1I0,1F1,(1F2;1B1)OVERLAP_F_B,1W0,(1F3;1B2)OVERLAP_F_B,1B3\n"
    )

    def make(stages: Any, microbatches: int, **given: Any) -> Any:
        schedule = _PipelineScheduleRuntime(stages, microbatches, **given)
        schedule._load_csv(str(path))
        return schedule

    program = of_blocks(2, make_schedule=make)
    path.unlink()
    return program.run(2)


@ranks(2)
def test_data_parallelism_around_a_stage() -> list[str]:
    """Every rank a pipeline of its own, with half of the batch."""
    rank = dist.get_rank()
    groups = [dist.new_group([at]) for at in range(2)]
    module, plain = block(), block()
    plain.load_state_dict(module.state_dict())
    seen: list[Tensor] = []
    module[0].weight.register_hook(seen.append)  # type: ignore[index]
    wrapped = DistributedDataParallel(module)
    stage = SplitPipelineStage(wrapped, 0, 1, torch.device("cpu"), group=groups[rank])
    schedule = Schedule1F1B(stage, 2, loss_fn=mean_square)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    schedule.step(x.chunk(2)[rank], target=y.chunk(2)[rank])
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (mean_square(plain(a), b) / 4).backward()
    found = [] if len(seen) == 2 else [f"a hook fired {len(seen)} times"]
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        if not torch.allclose(mine.grad, other.grad):  # type: ignore[arg-type]
            found.append("gradients are not the mean over the ranks")
    return found


@ranks(2)
def test_a_schedule_of_ours() -> list[str]:
    """With neighbours on each rank."""
    schedule = build("1f1b", 4, 4, ranks=2)

    def make(stages: Any, microbatches: int, **given: Any) -> Any:
        return torch_schedule(schedule, stages, **given)

    return of_blocks(4, mine=schedule.held(dist.get_rank()), make_schedule=make).run(2)


@ranks(2)
def test_actions_that_reduce_nothing_divide_nothing() -> list[str]:
    path = Path(f"/tmp/autosplit-comms-{dist.get_rank()}-{os.getpid()}.csv")

    def make(stages: Any, microbatches: int, **given: Any) -> Any:
        schedule = _PipelineScheduleRuntime(stages, microbatches, **given)
        write_csv(build("gpipe", 2, 4), path, "compute_comms")
        schedule._load_csv(str(path), format="compute_comms")
        schedule.scale_grads = True
        return schedule

    program = of_blocks(2, make_schedule=make, **_UNSCALED)
    path.unlink()
    return program.run(2)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(block() for _ in range(4)))
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.parts(x * self.scale)
        return made


@ranks(2)
def test_stages_that_torchs_pipeline_function_cuts() -> list[str]:
    """They are graphs of torch.fx."""
    cuts = {f"parts.{at}": SplitPoint.BEGINNING for at in range(1, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pipeline(Whole(), (torch.randn(2, 4),), split_spec=cuts)
    parts = [pipe.get_stage_module(at) for at in range(4)]
    data = {"args": [torch.randn(8, 4)], "target": torch.randn(8, 4)}
    return Program(parts, "ScheduleZBVZeroBubble", **data).run(2)


@ranks(2)
def test_earlier_gradients_and_an_odd_number_of_microbatches() -> list[str]:
    """A quotient by three is not a product with a third."""
    program = of_blocks(2, microbatches=3)
    program.args, program.target = [torch.randn(9, 4)], torch.randn(9, 4)
    return program.run(3)


@ranks(2)
def test_compiled_with_inductor() -> list[str]:
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    program = Program(
        parts,
        "ScheduleInterleavedZeroBubble",
        args=[torch.randn(8, 4, requires_grad=True)],  # so that the first stage is as the others
        target=torch.randn(8, 4),
        options={"backend": "inductor"},
    )
    return [each for each in program.run(2) if not float(each.rpartition(" ")[2]) < 1e-6]
