"""Training with two copies of the stages, over real Gloo processes."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.errors import PipelineError, ScheduleError
from autosplit.pipeline.engine.results import Bucket
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.trainer import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.tables import schedule_of
from tests.pipeline.workers import WIDTH, Tied, block, data, equal, single_process, trainer, whole
from tests.ranks import Ranks, ranks

Gradients = dict[int, dict[str, Tensor]]


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


def gradients(name: str, stages: int, count: int, **more: Any) -> None:
    """One batch against one process, and a second batch on top."""
    batch = data(2 * count)
    losses = single_process(whole(stages), *batch, count)
    with trainer(stages=stages, microbatches=count, schedule=name, **more) as engine:
        assert torch.equal(engine.forward_backward(batch), losses)
        grads = copy.deepcopy(engine.gradients())
        expected = expected_gradients(engine.schedule, stages, 2 * count)
        assert equal(grads, {stage: expected[stage] for stage in grads})
        assert _copies_equal(grads)
        engine.forward_backward(batch)
        for stage, own in engine.gradients().items():
            assert all(torch.equal(g, 2 * grads[stage][n]) for n, g in own.items())


@pytest.mark.parametrize(
    ("name", "stages", "count", "options"),
    [
        ("chimera", 2, 6, {}),
        ("chimera", 2, 4, {"split_backward": False}),
        ("chimera", 5, 4, {"ranks": 2}),
        ("dualpipe", 2, 6, {"stage_factory": None}),
    ],
)
@ranks(2)
def test_losses_and_gradients(name: str, stages: int, count: int, options: dict[str, Any]) -> None:
    gradients(name, stages, count, **options)


class Noting(ReferenceStage):
    """Notes whose weight gradients run."""

    log: ClassVar[list[str]] = []

    def backward_weight(self, microbatch: int) -> None:
        self.log.append(f"weights of stage {self.index}")
        super().backward_weight(microbatch)


@ranks(2)
def test_sums_start_before_the_rank_is_done() -> None:
    """The last stage's gradients are complete on both ranks while the first still runs."""
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
    own = [f"{what} of stage {stage}" for stage in (1, 0) for what in ("weights", "sum")]
    assert Noting.log[-4:] == own


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


@ranks(2)
def test_training_steps() -> None:
    """Against steps in flight, bit for bit, and against 1F1B."""
    first, flying = (_trained("chimera", call, 2) for call in ("step", "step_async"))
    starts = {stage: state for row in _everywhere(first["start"]) for stage, state in row.items()}
    plain = _trained("1f1b", "step", 2, start=starts)
    assert _copies_equal(first["start"])
    assert _copies_equal(first["state"])
    assert equal(first, flying)
    for mine, theirs in zip(first["losses"], plain["losses"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-8)
    assert first["norms"] == pytest.approx(plain["norms"], abs=1e-5)
    clipped = [norm > 0.5 for norm in first["norms"]]
    assert any(clipped)
    assert not all(clipped)


@ranks(4)
def test_tied_ends() -> None:
    """Four copies of a weight on two of the ranks."""
    batch, ends = data(8), Tied(0)
    model = nn.Sequential(ends, block(1), block(2), ends)
    losses = single_process(model, *batch, 4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with trainer(
        lambda index: Tied(index) if index in (0, 3) else block(index),
        4,
        schedule="chimera",
        shared_parameters=[[(0, "tied"), (3, "tied")]],
        max_grad_norm=1e9,
    ) as engine:
        assert torch.equal(engine.forward_backward(batch), losses)
        assert engine.grad_norm == pytest.approx(float(norm), abs=1e-5)
        for stage, grads in engine.gradients().items():
            for name, grad in grads.items():
                expected = model[stage].get_parameter(name).grad
                torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7)
        assert _copies_equal(engine.gradients())


class Unused(nn.Module):
    """Has a parameter that no loss depends on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = block(index)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@ranks(2)
def test_without_a_gradient_weight_decay_leaves_a_parameter_as_it_is() -> None:
    with trainer(Unused, schedule="chimera", optimizer_fn=_adam, stage_factory=None) as engine:
        engine.step(data(8))
        assert all((m.get_parameter("unused") == 1).all() for m in engine.modules.values())


def checkpoints(folder: Path) -> None:
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
    assert equal(one, {stage: expected[stage] for stage in one})
    with trainer(lambda index: block(index + 5), schedule="chimera", **options) as engine:
        load_checkpoint(engine, folder / "one", **names)
        assert equal(step(engine), expected)


def test_checkpoints_hold_each_parameter_once(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(checkpoints, 2, (tmp_path,), timeout=60)


# --- what ends badly ------------------------------------------------------------------------------


def with_batch_norm(index: int) -> nn.Module:
    return nn.Sequential(block(index), nn.BatchNorm1d(WIDTH)) if index else block(index)


def by_rank(index: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=dist.get_rank() == 0)


class Failing(nn.Module):
    """Stage 1 on rank 0, the second copy's, fails in its first microbatch; built it runs once."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = block(index)
        self._bad = index == 1 and dist.get_rank() == 0

    def forward(self, x: Tensor) -> Tensor:
        if self._bad and bool(x.any()):
            raise ValueError("bad weather")
        return self.inner(x)


ONE = block(0)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "written buffer": ({"model": with_batch_norm}, "the forward of stage 1 writes its buffer '1."),
    "built differently": (
        {"model": by_rank},
        "the ranks 0 and 1 hold copies of the same stages, which must be built alike: rank 0 has "
        "stage 0's bias: float32[6], trained, rank 1 has nothing more",
    ),
    "one for both": (
        {"model": lambda index: ONE},
        "the stages 0 and 1 hold one parameter, '0.weight' of stage 0: name it in shared",
    ),
    "two batches": ({}, "give every rank the same batch"),
    "failing copy": ({"model": Failing}, "rank 0 failed in 1F1: ValueError: bad weather"),
    "one microbatch": (
        {
            "schedule": dataclasses.replace(
                schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1), mirror=(1, 0)
            ),
            "microbatches": 1,
        },
        "schedule 'table' has two copies of the stages and one microbatch, so that",
    ),
    "odd count": (
        {"microbatches": 3},
        "'chimera' needs an even number of ranks and of microbatches; got 2 ranks and 3",
    ),
}


@pytest.mark.parametrize("scenario", REFUSED)
@ranks(2)
def test_refusals(scenario: str) -> None:
    options, said = REFUSED[scenario]
    rows = 8 + 4 * dist.get_rank() if scenario == "two batches" else 8
    with pytest.raises((PipelineError, ScheduleError)) as caught:
        trainer(**{"schedule": "chimera", **options}).step(data(rows))
    assert said in str(caught.value)
