"""SplitPipelineStage under torch's own schedules, on two Gloo ranks, beside plain autograd."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline, schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autosplit.pipeline import build
from autosplit.pipeline.validation.torch_csv import add_communication
from autosplit.pipelining import SplitPipelineStage, reset_shapes, torch_schedule
from autosplit.torch_internals import TORCH
from tests.kept_ranks import ranks
from tests.semantics.test_backward_writes import Writer
from tests.zoo import Made

from .programs import Program, around, block, mean_square, no_leaked_tensors, trained


def of_blocks(stages: int, **more: Any) -> Program:
    return trained(*(block() for _ in range(stages)), **more)


ZB = "ScheduleInterleavedZeroBubble"
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
    result = program.run()
    with no_leaked_tensors():
        program.step()
    program.plain_step()
    return result + program.differences()


def keyed(inner: nn.Module, x: Tensor, *, mask: Tensor, power: int) -> Tensor:
    return inner(x * mask).pow(power)  # type: ignore[no-any-return]


def several(inner: nn.Module, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """A tensor, a view of it, an input as it is, and a mask, as it takes them."""
    built = inner(x)
    if more:
        built = built + more[0].mT.sum() * more[2]
    return built, built.mT, more[1] if more else x, built > 0


def joined(inner: nn.Module, x: Tensor, turned: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
    return inner(x * mask) + skip  # type: ignore[no-any-return]


def named(inner: nn.Module, hidden: Any) -> dict[str, Any]:
    """A dictionary, as it takes one."""
    built = inner(hidden["hidden"] if isinstance(hidden, dict) else hidden)
    return {"hidden": built, "parts": [built.sum(1), built[:, :2]]}


def named_loss(output: dict[str, Any], target: Tensor, weight: float = 2) -> Tensor:
    return weight * mean_square(output["hidden"], target) + output["parts"][0].square().mean()


def tied() -> nn.Module:
    """One weight twice, with a layer in between, and an output that is a view."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return nn.Sequential(
        one, nn.Linear(4, 4), nn.Tanh(), two, nn.Unflatten(1, (2, 2)), nn.Flatten()
    )


def whole() -> nn.Module:
    return Made(
        lambda m, x: m.parts(x * m.scale),
        parts=nn.Sequential(*(block() for _ in range(4))),
        scale=nn.Buffer(torch.full((4,), 0.5)),
    )


def compiled(part: nn.Module) -> nn.Module:
    return torch.compile(part, backend="eager")  # type: ignore[return-value]


def with_compiled_blocks() -> Program:
    """Blocks compiled one by one, and in place; a stage compiled whole."""
    parts: list[nn.Module] = [nn.Sequential(compiled(block()), compiled(block())), block()]
    parts += [nn.Sequential(block(), block()), compiled(block())]
    parts[2][0].compile(backend="eager")  # type: ignore[index]
    return trained(*parts, kind=ZB)


def cut_by_torch() -> Program:
    """Stages are graphs of torch.fx."""
    cuts = {f"parts.{at}": SplitPoint.BEGINNING for at in range(1, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pipeline(whole(), (torch.randn(2, 4),), split_spec=cuts)
    parts = map(pipe.get_stage_module, range(4))
    return trained(*parts, kind="ScheduleZBVZeroBubble")


def with_frozen(*frozen: int) -> Program:
    parts = [block() for _ in range(4)]
    for at in frozen:
        parts[at].requires_grad_(False)
    return trained(*parts, kind=ZB)


def exchanged() -> Program:
    """As torchtitan does once it has parallelised a module."""
    program = of_blocks(2)
    for at, stage in zip(program.mine, program.stages, strict=True):
        program.parts[at] = stage.submod = copy.deepcopy(stage.submod)  # type: ignore[index]
    return program


def of_ours() -> Program:
    """With neighbours on each rank."""
    schedule = build("1f1b", 4, 4, ranks=2)

    def make(stages: Any, microbatches: int, **arguments: Any) -> Any:
        return torch_schedule(schedule, stages, **arguments)

    return of_blocks(4, mine=schedule.stages_on(dist.get_rank()), make_schedule=make)


def from_a_file(write: Callable[[Path], Any], form: str = "compute_only", **more: Any) -> Program:
    def make(stages: Any, microbatches: int, **arguments: Any) -> Any:
        schedule = _PipelineScheduleRuntime(
            stages, microbatches, **{**arguments, "scale_grads": True}
        )
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "schedule.csv")
            schedule._load_csv(f"{folder}/schedule.csv", format=form)
        return schedule

    return of_blocks(2, make_schedule=make, **more)


def with_messages(path: Path) -> None:
    rows = [[*map(str, row)] for row in add_communication(build("gpipe", 2, 4))]
    if hasattr(schedules, "WAIT_SEND_F"):  # torch 2.15
        rows = [[*row, *(a.replace("S", "WAIT_S") for a in row if "SEND" in a)] for row in rows]
    path.write_text("\n".join(map(",".join, rows)) + "\n")


OVERLAPPING = """0F0,0F1,,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,,0B2,,0I3,0W3
,1F0,1I0,1F1,(1F2;1B1)OVERLAP_F_B,1W0,(1F3;1B2)OVERLAP_F_B,1B3
"""
EQUAL: dict[str, Callable[[], Program]] = {
    "keyword arguments": lambda: trained(
        *map(around, [keyed] * 2), kind=ZB, kwargs={"mask": torch.rand(8, 4).round(), "power": 2}
    ),
    "several outputs": lambda: trained(
        *map(around, [several, several, several, joined]), kind="ScheduleZBVZeroBubble"
    ),
    "dictionaries and arguments of the loss": lambda: trained(
        *map(around, [named] * 2),
        kind=ZB,
        loss=named_loss,
        loss_kwargs={"weight": 0.5} if TORCH >= (2, 13) else {},  # before, step() takes none
    ),
    "a module exchanged before the first step": exchanged,
    "chunks along another dimension": lambda: trained(
        around(lambda inner, x: inner(x.mT)),
        block(),
        args=[torch.randn(4, 8)],
        schedule_options={"args_chunk_spec": (TensorChunkSpec(1),)},
        cut=lambda tensor, count: tensor.tensor_split(count, 1),
    ),
    "activation checkpointing": lambda: trained(
        *(around(lambda f, x: checkpoint(f, x, use_reentrant=False) + x) for _ in range(2)), kind=ZB
    ),
    "backwards that write": lambda: trained(
        Writer("sum", size=4), Writer("largest", size=4), kind=ZB
    ),
    "the first, the third and the last stage frozen": lambda: with_frozen(0, 2, 3),
    "tied weights and views": lambda: trained(tied(), tied(), kind=ZB),
    # A quotient by three is not a product with a third.
    "three microbatches of two sizes": lambda: of_blocks(2, kind=ZB, microbatches=3, rows=10),
    "buffers that each forward writes": lambda: trained(
        *(nn.Sequential(block(), nn.BatchNorm1d(4)) for _ in range(2)), kind=ZB
    ),
    "a stage that writes into its input": lambda: trained(
        block(), around(lambda f, x: f(x.relu_()))
    ),
    "overlapping actions": lambda: from_a_file(lambda path: path.write_text(OVERLAPPING)),
    # Nothing is reduced, and so nothing divided.
    "communication": lambda: from_a_file(with_messages, "compute_comms", **_UNSCALED),
    "a schedule of ours": of_ours,
    "blocks compiled by torch": with_compiled_blocks,
    "stages that torch's pipeline function cuts": cut_by_torch,
}


@pytest.mark.parametrize("case", EQUAL)
@ranks(2)
def test_steps_are_those_of_plain_autograd(case: str) -> list[str]:
    return EQUAL[case]().run(2)


@ranks(2)
def test_without_outputs_and_with_losses() -> list[str]:
    program = of_blocks(2)
    result = program.run(return_outputs=False)
    if program.output is not None:
        result.append("outputs were returned")
    if program.last and len(program.losses) != 4:
        result.append("losses are missing")
    return result


@ranks(2)
def test_evaluation_before_and_after_training() -> list[str]:
    program = of_blocks(2, kind=ZB)
    results = []
    for mode in (contextlib.nullcontext, torch.no_grad):
        with mode():
            output = program.step("eval")
        if program.last:
            whole = torch.cat([program.plain_forward(at).detach() for at in range(4)])
            losses = len(program.losses)
            if not torch.equal(output, whole) or output.requires_grad or losses != 4:
                results.append("evaluation differs")
        results += program.run()
    return results


def reset_as_automodel(program: Program) -> None:
    """Reset as NeMo AutoModel does before a batch of another length."""
    for stage in program.stages:
        stage._outputs_meta = stage.inputs_meta = stage.grad_send_info = None
        stage.args_recv_info, stage.grad_recv_info = {}, {}
    for name in ("_stage_forward", "_stage_backward", "_stages_forward", "_stages_backward"):
        if hasattr(program.schedule, f"{name}_initialized"):
            setattr(program.schedule, f"{name}_initialized", False)


RESETS = [(12, reset_as_automodel), (4, None), (8, None), (12, None)]


@pytest.mark.parametrize(("kind", "stages", "resets"), [("Schedule1F1B", 2, 4), (ZB, 4, 2)])
@ranks(2)
def test_batches_of_other_sizes_after_a_reset(kind: str, stages: int, resets: int) -> list[str]:
    parts = [block() for _ in range(stages)]
    parts[0].requires_grad_(False)
    program = trained(*parts, kind=kind)
    result = program.run()
    for rows, reset in RESETS[:resets]:
        program.args, program.target = [torch.randn(rows, 4)], torch.randn(rows, 4)
        (reset or (lambda item: reset_shapes(item.schedule)))(program)
        if rows == 8:
            program.step("eval")
            for part in (program.parts[0], program.plain[0]):  # until now, nothing waits for it
                part.requires_grad_()
        result += program.run(2)
    return result


@ranks(2)
def test_batches_of_other_sizes_on_one_rank() -> list[str]:
    group = [dist.new_group([at]) for at in range(2)][dist.get_rank()]
    program = of_blocks(2, kind="ScheduleInterleaved1F1B", options={"group": group})
    result = program.run()
    program.args, program.target = [torch.randn(12, 4)], torch.randn(12, 4)
    return result + program.run(2)


@dataclasses.dataclass
class Scale:
    by: Tensor


def scaled(inner: nn.Module, x: Tensor, *, scale: Scale) -> Tensor:
    return inner(x) * scale.by  # type: ignore[no-any-return]


@ranks(2)
def test_objects_by_name() -> list[str]:
    parts, rank, scale = [around(scaled), around(scaled)], dist.get_rank(), Scale(torch.randn(4))
    plain = copy.deepcopy(parts)
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    stage = SplitPipelineStage(parts[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=mean_square, scale_grads=False)
    inputs: dict[str, Any] = {"target": target} if rank else {}
    schedule.step(*(() if rank else (batch,)), scale=scale, **inputs)
    for rows, wanted in zip(batch.chunk(4), target.chunk(4), strict=True):
        mean_square(plain[1](plain[0](rows, scale=scale), scale=scale), wanted).backward()
    pairs = zip(parts[rank].named_parameters(), plain[rank].parameters(), strict=True)
    return [name for (name, mine), other in pairs if not torch.equal(mine.grad, other.grad)]  # type: ignore[arg-type]


@ranks(2)
def test_a_weight_of_two_stages_of_one_rank() -> list[str]:
    """Torch's stages divide it twice."""
    parts = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    parts[3].weight, parts[2].weight = parts[0].weight, parts[1].weight
    program = trained(*parts, kind="ScheduleZBVZeroBubble")
    program.plain[3].weight, program.plain[2].weight = (  # type: ignore[assignment]
        program.plain[0].weight, program.plain[1].weight,
    )  # fmt: skip
    result = program.run(2)
    return [item for item in result if not float(item.rpartition(" ")[2]) < 1e-6]


@ranks(2)
def test_hooks_on_parameters() -> list[str]:
    """Each fires once for each microbatch, and sees what it sees in a loop of backwards."""
    program = of_blocks(2, kind=ZB, **_UNSCALED)
    seen: list[list[Tensor]] = [[], []]
    for log, parts in zip(seen, (program.parts, program.plain), strict=True):
        for at in program.mine:
            weight = parts[at][0].weight  # type: ignore[index]
            weight.register_hook(lambda grad, log=log: log.append(grad.clone()))
    result = program.run(2)
    if len(seen[0]) != 8 or not all(map(torch.equal, *seen)):
        result.append(f"hooks saw {len(seen[0])} gradients, and others than in a loop")
    return result


@pytest.mark.parametrize("kind", ["ScheduleGPipe", ZB])
@ranks(2)
def test_optimizers_in_the_backward(kind: str) -> list[str]:
    """Hooks that wait for whole gradients step and free them, once a step."""
    program, calls = of_blocks(2 if kind == "ScheduleGPipe" else 4, kind=kind), list[Tensor]()
    nodes, ends = list[Node](), list[tuple[Tensor, Tensor]]()

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for at in program.mine:
        for parameter in program.parts[at].parameters():
            parameter.register_post_accumulate_grad_hook(step)
            parameter.register_post_accumulate_grad_hook(calls.append)
            nodes.append(get_gradient_edge(parameter).node)
            nodes[-1].register_hook(lambda _, grads, at=parameter: ends.append((at, *grads)))
    for _ in range(2):
        program.step()
        program.plain_step()
        with torch.no_grad():
            for plain in program.plain:
                for parameter in plain.parameters():
                    step(parameter)
    pairs = [
        zip(program.parts[at].parameters(), program.plain[at].parameters(), strict=True)
        for at in program.mine
    ]
    results = [f"{len(calls)} calls"] if len(calls) != 2 * len({*calls}) else []
    if [parameter for parameter, _ in ends] != calls:
        results.append("hooks on AccumulateGrad nodes had other calls")
    return results + ["weights differ" for pair in pairs for a, b in pair if not torch.equal(a, b)]


@ranks(2)
def test_gradients_of_what_the_caller_gave() -> list[str]:
    kwargs = {"mask": torch.rand(8, 4).requires_grad_(), "power": 2}
    batch = torch.randn(8, 4, requires_grad=True)
    program = trained(*map(around, [keyed] * 2), args=[batch], kwargs=kwargs)
    inputs = [*program.args, program.kwargs["mask"]]
    program.step()
    mine = [item.grad for item in inputs]
    for element in inputs:
        element.grad = None
    program.plain_step()
    result = program.differences()
    if 0 in program.mine and not torch.equal(mine[0], inputs[0].grad):
        result.append("gradient of the input")
    total = mine[1].clone()
    dist.all_reduce(total)
    if not torch.allclose(total, inputs[1].grad):
        result.append("gradient of the keyword argument")
    return result


@ranks(2)
def test_modules_that_change_between_steps() -> list[str]:
    parts = [nn.Sequential(block(), nn.Dropout(0.5)) for _ in range(2)]
    program = trained(*parts, kind=ZB)
    program.step()
    for part in [*program.parts, *program.plain]:
        part.eval()
        part.zero_grad()
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
    results = [] if len(seen) == 2 else [f"a hook fired {len(seen)} times"]
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        if not torch.allclose(mine.grad, other.grad):  # type: ignore[arg-type]
            results.append("gradients are not the mean over the ranks")
    return results


@ranks(2)
def test_compiled_with_inductor() -> list[str]:
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    batch = torch.randn(8, 4, requires_grad=True)  # so that the first stage is as the others
    program = trained(*parts, kind=ZB, args=[batch], options={"backend": "inductor"})
    return [item for item in program.run(2) if not float(item.rpartition(" ")[2]) < 1e-6]
