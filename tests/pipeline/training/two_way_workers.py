"""Trainings with two copies of the stages, for spawned processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.pipeline.engine.results import Bucket
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.trainer import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.training.parameter_workers import Tied
from tests.pipeline.training.two_way_endings import SCENARIOS
from tests.pipeline.workers import (
    WIDTH,
    block,
    data,
    equal,
    outcomes,
    single_process,
    trainer,
    whole,
)

Gradients = dict[int, dict[str, Tensor]]


def _close(one: Gradients, other: Gradients) -> bool:
    return all(
        torch.allclose(grad, other[stage][name], rtol=1e-5, atol=1e-7)
        for stage, grads in one.items()
        for name, grad in grads.items()
    )


def _everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _copies_equal(values: dict[int, Any]) -> bool:
    """Whether what ranks have by stage is the same on both that hold the stage."""
    first: dict[int, Any] = {}
    rows = _everywhere(values)
    assert sum(map(len, rows)) == 2 * len({stage for row in rows for stage in row})
    return all(equal(first.setdefault(s, each), each) for row in rows for s, each in row.items())


def expected_gradients(schedule: Schedule, stages: int, rows: int) -> Gradients:
    """Plain autograd's: each copy adds up its microbatches in the order in which it runs their
    weight gradients, then the two copies' sums are added."""
    count = schedule.microbatches
    inputs, targets = (part.chunk(count) for part in data(rows))
    model = whole(stages)
    found: list[Gradients] = []
    for x, y in zip(inputs, targets, strict=True):
        loss = F.mse_loss(model(x), y) / count
        grads = iter(torch.autograd.grad(loss, list(model.parameters())))
        named = [[name for name, _ in module.named_parameters()] for module in model]
        found.append({s: {n: next(grads) for n in names} for s, names in enumerate(named)})
    sums: list[dict[tuple[int, str], Tensor]] = [{}, {}]
    for row in schedule.ranks:
        for action in row:
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                total = sums[action.microbatch % 2]
                for name, grad in found[action.microbatch][action.stage].items():
                    at = action.stage, name
                    total[at] = total[at] + grad if at in total else grad
    result: Gradients = {stage: {} for stage in range(stages)}
    for (stage, name), total in sums[0].items():
        result[stage][name] = total + sums[1][stage, name]
    return result


def gradients(name: str, stages: int, count: int, **more: Any) -> dict[str, bool]:
    """One batch against one process, against 1F1B, and a second batch on top."""
    batch = data(2 * count)
    losses = single_process(whole(stages), *batch, count)
    with trainer(stages=stages, microbatches=count, schedule=name, **more) as engine:
        both = engine.forward_backward(batch)
        grads = copy.deepcopy(engine.gradients())
        engine.forward_backward(batch)
        twice = engine.gradients()
        expected = expected_gradients(engine.schedule, stages, 2 * count)
        found = {
            "losses": torch.equal(both, losses),
            "gradients": equal(grads, {stage: expected[stage] for stage in grads}),
            "copies": _copies_equal(grads),
            "twice": all(
                torch.equal(twice[s][n], 2 * g) for s, own in grads.items() for n, g in own.items()
            ),
        }
    if more and name == "chimera":
        return found
    with trainer(stages=stages, microbatches=count, **more) as engine:
        found["losses of 1F1B"] = torch.equal(engine.forward_backward(batch), both)
        mine = engine.gradients()
        own = {stage: grads[stage] for stage in grads.keys() & mine.keys()}
        found["gradients of 1F1B"] = _close(own, mine)
        if count == 2:  # two numbers have one sum
            found["gradients of 1F1B, bit for bit"] = equal(own, {s: mine[s] for s in own})
    return found


class Noting(ReferenceStage):
    """Notes whose weight gradients run."""

    log: ClassVar[list[str]] = []

    def backward_weight(self, microbatch: int) -> None:
        self.log.append(f"weights of stage {self.index}")
        super().backward_weight(microbatch)


def overlapped() -> list[str]:
    """What happens in one step: weight gradients, and sums that start."""
    start = Bucket.start

    def noted(bucket: Bucket) -> None:
        Noting.log.append(f"sum of stage {bucket.stage}")
        start(bucket)

    with (
        patch.object(Bucket, "start", noted),
        trainer(schedule="chimera", split_backward=False, stage_factory=Noting) as engine,
    ):
        Noting.log.clear()
        engine.step(data(8))
    return list(Noting.log)


class Whole(nn.Module):
    """A linear map by whole numbers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.weight = nn.Parameter(torch.randint(-2, 3, (WIDTH, WIDTH)).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def exact_sums(stages: int) -> bool:
    """Where no sum is rounded, gradients are those of 1F1B bit for bit."""
    count = 2 * stages
    batch = tuple(part.mul(4).round() for part in data(2 * count))
    found = []
    for schedule in ("chimera", "1f1b"):
        with trainer(
            Whole,
            stages,
            count,
            schedule=schedule,
            loss_fn=lambda output, target: (output * target).sum(),
            stage_factory=None,
        ) as engine:
            engine.forward_backward(batch)
            found.append(copy.deepcopy(engine.gradients()))
    shared = found[0].keys() & found[1].keys()
    return bool(shared) and all(equal(found[0][stage], found[1][stage]) for stage in shared)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def _different(index: int) -> nn.Module:
    """Values that every rank draws for itself, with a buffer and a frozen parameter."""
    torch.manual_seed(97 * dist.get_rank() + index)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval(), nn.Tanh())
    nn.init.normal_(module.get_parameter("1.weight"))
    module.get_parameter("1.bias").data.normal_()
    module.get_parameter("1.bias").requires_grad_(False)
    module.get_buffer("1.running_mean").normal_()
    return module


def _trained(schedule: str, call: str, stages: int, **more: Any) -> dict[str, Any]:
    """Clipped steps; losses, norms and the state behind them."""
    kept: dict[int, Any] = more.pop("start", {})
    with trainer(
        _different,
        stages,
        2 * stages,
        schedule=schedule,
        optimizer_fn=_adam,
        max_grad_norm=0.5,
        **more,
    ) as engine:
        for index, state in kept.items():
            if index in engine.modules:
                engine.modules[index].load_state_dict(state)
        start = copy.deepcopy(engine.state_dict())
        results, norms = [], []
        for step, factor in enumerate((0.1, 0.1, 9.0, 9.0, 0.1)):
            inputs, targets = data(4 * stages, seed=step)
            results.append(getattr(engine, call)((inputs, factor * targets)))
            if call == "step":
                norms.append(engine.grad_norm)
        losses = [each if isinstance(each, Tensor) else each.wait() for each in results]
        norms = norms or [each.norm() for each in results]
        evaluated = engine.evaluate(data(4 * stages))
        return {
            "start": start,
            "losses": [*losses, evaluated],
            "norms": norms,
            "state": copy.deepcopy(engine.state_dict()),
        }


def training(stages: int) -> dict[str, Any]:
    """Two-way steps: against themselves, against steps in flight, against 1F1B."""
    first, again, flying = (
        _trained("chimera", call, stages) for call in ("step", "step", "step_async")
    )
    starts = {stage: state for row in _everywhere(first["start"]) for stage, state in row.items()}
    plain = _trained("1f1b", "step", stages, start=starts)
    clipped = [norm > 0.5 for norm in first["norms"]]
    return {
        "start": _copies_equal(first["start"]),
        "state": _copies_equal(first["state"]),
        "same every time": equal(first, again),
        "same in flight": equal(first, flying),
        "losses": all(
            torch.allclose(*each, rtol=1e-4)
            for each in zip(first["losses"], plain["losses"], strict=True)
        ),
        "norms": all(
            abs(a - b) < 1e-5 for a, b in zip(first["norms"], plain["norms"], strict=True)
        ),
        "clipped": any(clipped) and not all(clipped),
    }


def tied(stages: int) -> dict[str, bool]:
    """The ends share a weight: four copies of it on two ranks."""
    last, count = stages - 1, stages
    batch = data(2 * count)
    ends = Tied(0)
    model = nn.Sequential(ends, *[block(index) for index in range(1, last)], ends)
    losses = single_process(model, *batch, count)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with trainer(
        lambda index: Tied(index) if index in (0, last) else block(index),
        stages,
        count,
        schedule="chimera",
        shared_parameters=[[(0, "tied"), (last, "tied")]],
        max_grad_norm=1e9,
    ) as engine:
        found = {"losses": torch.equal(engine.forward_backward(batch), losses)}
        found["norm"] = abs((engine.grad_norm or 0.0) - float(norm)) < 1e-5
        plain = {i: {n: p.grad for n, p in model[i].named_parameters()} for i in range(stages)}
        found["gradients"] = _close(engine.gradients(), plain)
        found["copies"] = _copies_equal(engine.gradients())
    return found


class Unused(nn.Module):
    """Has a parameter that no loss depends on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = block(index)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


def unused() -> bool:
    """Without a gradient, weight decay leaves a parameter as it is."""
    with trainer(Unused, schedule="chimera", optimizer_fn=_adam, stage_factory=None) as engine:
        engine.step(data(8))
        return all(bool((m.get_parameter("unused") == 1).all()) for m in engine.modules.values())


def checkpoints(folder: Path) -> dict[str, bool]:
    """Written by two copies, taken up by one, and back; the next step is the same."""
    options: dict[str, Any] = {"optimizer_fn": _adam, "microbatches": 2}
    names: dict[str, Any] = {"names": lambda stage, name: f"{stage}.{name}"}

    def step(engine: PipelineTrainer) -> dict[int, Any]:
        engine.step(data(8, seed=1))
        return copy.deepcopy(engine.state_dict())

    with trainer(schedule="chimera", **options) as engine:
        engine.step(data(8))
        save_checkpoint(engine, folder / "two", **names)
        expected = step(engine)
    with trainer(lambda index: block(index + 5), **options) as engine:
        load_checkpoint(engine, folder / "two", **names)
        save_checkpoint(engine, folder / "one", **names)
        one = step(engine)
    with trainer(lambda index: block(index + 5), schedule="chimera", **options) as engine:
        load_checkpoint(engine, folder / "one", **names)
        two = step(engine)
    return {
        "one": equal(one, {stage: expected[stage] for stage in one}),
        "two": equal(two, expected),
    }


def two_ranks(folder: Path) -> dict[str, Any]:
    return {
        "chimera, M=2": gradients("chimera", 2, 2),
        "chimera, M=6": gradients("chimera", 2, 6),
        "chimera, fused": gradients("chimera", 2, 4, split_backward=False),
        "chimera, blocks": gradients("chimera", 5, 4, ranks=2),
        "dualpipe": gradients("dualpipe", 2, 6, stage_factory=None),
        "training": training(2),
        "exact": exact_sums(2),
        "overlapped": overlapped(),
        "unused": unused(),
        "checkpoints": checkpoints(folder),
        "refusals": outcomes(SCENARIOS),
    }


def four_ranks() -> dict[str, Any]:
    return {
        "chimera, M=4": gradients("chimera", 4, 4, max_grad_norm=1.0),
        "dualpipe": gradients("dualpipe", 4, 8),
        "tied": tied(4),
    }
