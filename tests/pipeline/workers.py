"""Functions that tests run in spawned processes, and the small models they train."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from reference_stage import ReferenceStage
from torch import Tensor, nn

from autosplit.errors import AutosplitError, PipelineError
from autosplit.pipeline.faults import Board, Fault, Guard, RankError
from autosplit.pipeline.groups import Groups, losing
from autosplit.pipeline.trainer import PipelineTrainer

WIDTH = 6


def block(index: int) -> nn.Module:
    """Stage ``index``, the same on every call."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def data(rows: int, seed: int = 100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, WIDTH, generator=generator),
    )


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def trainer(
    stages: Any = block, num_stages: int | None = 2, microbatches: int = 4, **options: Any
) -> PipelineTrainer:
    options = {"timeout": 30.0, "stage_factory": ReferenceStage, **options}
    if not callable(stages):
        num_stages = None
    return PipelineTrainer(
        stages,
        options.pop("loss_fn", F.mse_loss),
        options.pop("optimizer_fn", sgd),
        num_stages=num_stages,
        microbatches=microbatches,
        **options,
    )


def single_process(model: nn.Module, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
    """Losses per microbatch; the gradients of their mean are left in ``.grad``."""
    losses = []
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        loss = F.mse_loss(model(x), y)
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def whole(stages: int) -> nn.Sequential:
    return nn.Sequential(*[block(index) for index in range(stages)])


def gradients_equal(mine: dict[int, dict[str, Tensor]], model: nn.Sequential) -> bool:
    """Whether a rank's gradients are bit for bit those of the whole model."""
    for stage, grads in mine.items():
        expected = {name: p.grad for name, p in model[stage].named_parameters()}
        if grads.keys() != expected.keys():
            return False
        for name, grad in grads.items():
            other = expected[name]
            if other is None or not torch.equal(grad, other):
                return False
    return True


# --- launch ---------------------------------------------------------------------------------


def identify(factor: int) -> tuple[int, int, str, int]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    environment = " ".join(f"{key}={os.environ[key]}" for key in keys)
    return dist.get_rank() * factor, int(total), environment, torch.get_num_threads()


def note_pid(folder: Path) -> None:
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))


def fail(folder: Path, how: str) -> None:
    """Rank 1 ends in some way while rank 0 waits for it."""
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        _END[how]()
    dist.recv(torch.zeros(1), src=1)


def _raise() -> None:
    raise ValueError("bad weather")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    time.sleep(600)


def _exit() -> None:
    os._exit(7)


_END: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "sleep": _sleep,
    "exit": _exit,
}


# --- pipelines ------------------------------------------------------------------------------


def schedule_grid(stages: int, counts: tuple[int, ...] = (1, 2, 5), **more: Any) -> dict[str, str]:
    """Every schedule x split x M on this process group; says what differed, by case."""
    found = {}
    splits: tuple[dict[str, Any], ...] = (
        {"split_backward": False},
        {"weights": "2bp"},
        {"weights": "fill"},
    )
    for name, options, count in itertools.product(("naive", "gpipe", "1f1b"), splits, counts):
        inputs, targets = data(2 * count)
        model = whole(stages)
        expected = single_process(model, inputs, targets, count)
        with trainer(
            num_stages=stages, microbatches=count, schedule=name, **options, **more
        ) as engine:
            losses = engine.forward_backward((inputs, targets))
            same = gradients_equal(engine.gradients(), model) and torch.equal(losses, expected)
            case = f"{name} {'/'.join(str(v) for v in options.values())} M={count}"
            found[case] = "equal" if same else f"differs: {losses} {expected}"
    return found


def train_and_clip(stages: int, max_norm: float, **more: Any) -> dict[str, bool]:
    """Three clipped steps against the same in a single process; and evaluation."""
    count, found = 2, {}
    model = whole(stages)
    optimizer = sgd(list(model.parameters()))
    with trainer(num_stages=stages, microbatches=count, max_grad_norm=max_norm, **more) as engine:
        for step in range(3):
            inputs, targets = data(8, seed=step)
            expected = single_process(model, inputs, targets, count)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses = engine.step((inputs, targets))
            found[f"losses {step}"] = torch.allclose(losses, expected, rtol=1e-5)
            found[f"norm {step}"] = abs((engine.grad_norm or 0.0) - float(norm)) < 1e-5
            found[f"cleared {step}"] = all(not grads for grads in engine.gradients().values())
        for index, state in engine.state_dict().items():
            for name, value in model[index].state_dict().items():
                found[f"{index}.{name}"] = torch.allclose(state[name], value, atol=1e-6)
    return found


class Dropping(nn.Module):
    """Tells training from evaluation: doubles its input in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (2 if self.training else 1)


def evaluate(stages: int) -> dict[str, Any]:
    inputs, targets = data(8)
    with trainer(lambda _: Dropping(), num_stages=stages) as engine:
        first = engine.step((inputs, targets))
        shorter = engine.evaluate((inputs[:4], targets[:4]))
        again = engine.evaluate((inputs[:4], targets[:4]))
        trained = engine.step((inputs, targets))
        modes = [part.training for module in engine.modules.values() for part in module.modules()]
        weights = [module.get_parameter("weight") for module in engine.modules.values()]
        return {
            "first": first,
            "evaluated": shorter,
            "again": again,
            "trained": trained,
            "modes": modes,
            "grads": [weight.grad for weight in weights],
        }


class Tied(nn.Module):
    """One end of a model whose ends share a weight."""

    def __init__(self, index: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(50 + index)
        self.tied = nn.Parameter(torch.randn(width, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.tied))


def shared(stages: int, **more: Any) -> dict[str, bool]:
    """Stage 0 and the last one share their weight; held against a model with one weight."""
    last = stages - 1
    inputs, targets = data(8)
    ends = Tied(0)
    model = nn.Sequential(ends, *[block(index) for index in range(1, last)], ends)
    expected = single_process(model, inputs, targets, 4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with trainer(
        lambda index: Tied(index) if index in (0, last) else block(index),
        num_stages=stages,
        shared_parameters=[[(0, "tied"), (last, "tied")]],
        max_grad_norm=1e9,
        **more,
    ) as engine:
        found = {"losses": torch.equal(engine.forward_backward((inputs, targets)), expected)}
        found["norm"] = abs((engine.grad_norm or 0.0) - float(norm)) < 1e-5
        grads = engine.gradients()
        for index in engine.modules:
            for name, p in model[index].named_parameters():
                if p.grad is not None:
                    found[f"{index}.{name}"] = torch.allclose(
                        grads[index][name], p.grad, rtol=1e-5, atol=1e-7
                    )
        return found


class TwoWays(nn.Module):
    """Puts out two tensors that need a gradient and one that cannot have any."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x).t(), x.argmax(dim=1), self.right(x)


class Joined(nn.Module):
    """Uses one of its two differentiable inputs, so the other's gradient is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, chosen: Tensor, right: Tensor) -> Tensor:
        return self.last(left.t()) * (chosen[:, None] + 1)


def several_tensors(**more: Any) -> dict[str, bool]:
    torch.manual_seed(0)
    first, second = TwoWays(), Joined()
    inputs, targets = data(8)
    with trainer([first, second], **more) as engine:
        losses = engine.forward_backward((inputs, targets))
        mine = {f"{s}.{n}": g for s, grads in engine.gradients().items() for n, g in grads.items()}
    first.zero_grad()
    second.zero_grad()
    found = {}
    expected = []
    for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        loss = F.mse_loss(second(*first(x)), y)
        (loss / 4).backward()
        expected.append(loss.detach())
    # A view travels contiguous, which may take another kernel.
    found["losses"] = torch.allclose(losses, torch.stack(expected))
    for index, module in enumerate((first, second)):
        for name, p in module.named_parameters():
            grad = mine.get(f"{index}.{name}")
            if grad is not None:
                whole_grad = torch.zeros_like(p) if p.grad is None else p.grad
                found[f"{index}.{name}"] = torch.allclose(grad, whole_grad, atol=1e-7)
    return found


def frozen(stage: int, **more: Any) -> dict[str, Any]:
    """One of three stages is frozen. Nothing comes back to the first, but through the others."""
    inputs, targets = data(8)
    model = whole(3)
    model[stage].requires_grad_(False)
    expected = single_process(model, inputs, targets, 4)
    stages = list(whole(3))
    stages[stage].requires_grad_(False)
    with trainer(stages, **more) as engine:
        losses = engine.forward_backward((inputs, targets))
        grads = engine.gradients()
    return {
        "losses": torch.equal(losses, expected),
        "none": not grads.pop(stage, {}),
        "grads": gradients_equal(grads, model),
    }


def recorded(stages: int) -> tuple[list[str], list[str], bool]:
    """The timeline's actions on either rank, in order, and whether each starts before it ends."""
    inputs, targets = data(8)
    with trainer(num_stages=stages, microbatches=2, record=True) as engine:
        engine.step((inputs, targets))
        timeline = engine.timeline()
    rows = [[str(s.action) for s in timeline.spans if s.rank == rank] for rank in (0, 1)]
    ordered = all(span.start <= span.end for span in timeline.spans)
    return rows[0], rows[1], ordered


def one_rank_in_process() -> bool:
    """ranks=1 inside a larger process group talks to nobody."""
    inputs, targets = data(8)
    model = whole(3)
    single_process(model, inputs, targets, 4)
    if dist.get_rank() == 1:
        return True
    with trainer(num_stages=3, ranks=1) as engine:
        engine.forward_backward((inputs, targets))
        return gradients_equal(engine.gradients(), model)


def autocast() -> tuple[Tensor, Tensor, Tensor, list[torch.dtype]]:
    """Losses under bf16 autocast, of the pipeline and of one process; what was evaluated."""
    inputs, targets = data(8)
    model = whole(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = single_process(model, inputs, targets, 4)
    with trainer(autocast=torch.bfloat16, stage_factory=None) as engine:
        losses = engine.forward_backward((inputs, targets))
        dtypes = [g.dtype for grads in engine.gradients().values() for g in grads.values()]
        evaluated = engine.evaluate((inputs, targets))
    return losses, evaluated, expected, dtypes


def with_reference_stage() -> dict[str, Any]:
    return {
        "grid 2": schedule_grid(2),
        "grid 3": schedule_grid(3),
        "clip 0.1": train_and_clip(3, 0.1),
        "clip 100": train_and_clip(2, 100.0),
        "evaluate": evaluate(2),
        "shared 2": shared(2),
        "shared 4": shared(4),
        "several": several_tensors(),
        "frozen 0": frozen(0),
        "frozen 1": frozen(1),
        "recorded": recorded(2),
        "one rank": one_rank_in_process(),
    }


def with_split_stage() -> dict[str, Any]:
    """The same with the stages that ``autosplit.Stage`` makes."""
    return {
        "grid 2": schedule_grid(2, (3,), stage_factory=None),
        "grid 4": schedule_grid(4, (2,), backend="eager", stage_factory=None),
        "clip 0.1": train_and_clip(2, 0.1, stage_factory=None),
        "shared 3": shared(3, stage_factory=None),
        "several": several_tensors(stage_factory=None),
        "frozen 0": frozen(0, stage_factory=None),
        "frozen 1": frozen(1, stage_factory=None),
        "autocast": autocast(),
    }


def three_ranks() -> dict[str, Any]:
    return {"grid 3": schedule_grid(3), "grid 4": schedule_grid(4, (2,)), "shared 3": shared(3)}


# --- failures -------------------------------------------------------------------------------


class Trip(nn.Module):
    """A block whose forward does ``then`` at microbatch ``at``."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        super().__init__()
        self.block = block(1)
        # Shared by deep copies, and -1 because building the stage runs the module once.
        self._calls = itertools.count(-1)
        self._at = at
        self._then = then

    def __deepcopy__(self, memo: dict[int, Any]) -> Trip:
        return self

    def forward(self, x: Tensor) -> Tensor:
        if next(self._calls) == self._at:
            self._then()
        return self.block(x)


class Growing(nn.Module):
    """Puts out one more column for every microbatch after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block(0)
        self._calls = itertools.count(-1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Growing:
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x if next(self._calls) < 2 else torch.cat([x, x], dim=1)


class WeightTrip(ReferenceStage):
    """Raises in the second weight gradient of stage 0."""

    def backward_weight(self, microbatch: int) -> None:
        if self.index == 0 and microbatch == 1:
            raise RuntimeError("no weight today")
        super().backward_weight(microbatch)


def _factory_fails(index: int) -> nn.Module:
    if index == 1:
        raise OSError("no such checkpoint")
    return block(index)


def _optimizer_fails(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if dist.get_rank() == 0:
        raise ValueError("negative learning rate")
    return sgd(parameters)


def _step(batch: Any = None, **options: Any) -> None:
    trainer(**options).step(data(8) if batch is None else batch)


def _two_steps(first: int, second: int) -> None:
    engine = trainer()
    engine.step(data(first))
    engine.step(data(second))


def _trip_stage(index: int) -> nn.Module:
    return Trip(2, _raise) if index == 1 else block(index)


def _tied(names: list[tuple[int, str]], width: int = WIDTH) -> None:
    trainer(lambda index: Tied(index, WIDTH + index * (width - WIDTH)), shared_parameters=[names])


SCENARIOS: dict[str, Callable[[], None]] = {
    "forward": functools.partial(_step, stages=_trip_stage),
    "weight": functools.partial(_step, stage_factory=WeightTrip),
    "factory": functools.partial(_step, stages=_factory_fails),
    "optimizer": functools.partial(_step, optimizer_fn=_optimizer_fails),
    "shape between stages": functools.partial(
        _step, stages=lambda index: Growing() if index == 0 else block(1)
    ),
    "not divisible": lambda: _step(data(7)),
    "no inputs": lambda: _step((None, data(8)[1])),
    "no pair": lambda: _step(data(8)[0]),
    "no tensor": lambda: _step((["text"], data(8)[1])),
    "another shape": lambda: _two_steps(8, 12),
    "loss": functools.partial(_step, loss_fn=lambda output, target: output - target),
    "loss without gradient": functools.partial(_step, loss_fn=lambda output, target: target.mean()),
    "tied name": lambda: _tied([(0, "tied"), (1, "weight")]),
    "tied stage": lambda: _tied([(0, "tied"), (2, "tied")]),
    "tied alone": lambda: _tied([(0, "tied")]),
    "tied twice": lambda: _tied([(0, "tied"), (1, "tied"), (0, "tied")]),
    "tied shapes": lambda: _tied([(0, "tied"), (1, "tied")], width=8),
    "no timeline": lambda: print(trainer().timeline()),
    "no module": functools.partial(_step, stages=lambda index: index),
    "world size": functools.partial(_step, stages=[block(0)]),
    "ranks": functools.partial(_step, num_stages=3, ranks=3),
}


def failures() -> dict[str, tuple[str, str]]:
    """Type and text of the error in each scenario, one after another in one process group."""
    found = {}
    for name, scenario in SCENARIOS.items():
        try:
            scenario()
        except Exception as error:
            found[name] = type(error).__name__, str(error)
        else:
            found[name] = "nothing", ""
        dist.barrier()
    return found


def after_a_failure() -> dict[str, Any]:
    """What a failed step leaves: optimizers untouched, a trainer that says it has ended."""
    engine = trainer(_trip_stage)
    before = {index: _copy(state) for index, state in engine.state_dict().items()}
    for attempt in range(2):
        try:
            engine.step(data(8))
        except PipelineError as error:
            last = f"{attempt} {error}"
    same = all(
        torch.equal(state[name], before[index][name])
        for index, state in engine.state_dict().items()
        for name in state
    )
    engine.close()
    with trainer() as another:
        return {"same": same, "last": last, "next": another.step(data(8)).shape}


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def all_that_fails() -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    return failures(), after_a_failure()


def stuck(folder: Path, how: str) -> None:
    """Rank 1 is killed or sleeps in the middle of a step; the others note what they saw."""
    note_pid(folder)
    stages = dist.get_world_size()
    engine = trainer(
        lambda index: Trip(1, _END[how]) if index == 1 else block(index),
        num_stages=stages,
        timeout=3.0 if how == "sleep" else 60.0,
    )
    try:
        engine.step(data(8))
    except PipelineError as error:
        (folder / f"{dist.get_rank()}.txt").write_text(str(error))
        raise
