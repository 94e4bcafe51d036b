"""Training runs for spawned processes; each says where it differs from a single process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.pipeline.schedule.action import ActionKind
from tests.pipeline.training.overlap_workers import (
    asynchronous,
)
from tests.pipeline.training.parameter_workers import (
    frozen,
    hooked,
    shared,
    some_are_not_moved,
    tied_in_a_list,
)
from tests.pipeline.workers import WIDTH, data, gradients_equal, sgd, single_process, trainer, whole

SCHEDULES = ("naive", "gpipe", "1f1b")
SPLITS: tuple[dict[str, Any], ...] = (
    {"split_backward": False},
    {"weights": "2bp"},
    {"weights": "fill"},
)


def one_part(part: tuple[int, int], *factors: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Of all combinations the first, second... of so many parts; none is in two of them."""
    for chosen in itertools.product(*map(enumerate, factors)):
        if sum(place for place, _ in chosen) % part[1] == part[0]:
            yield tuple(value for _, value in chosen)


def schedule_grid(
    stages: int,
    counts: tuple[int, ...] = (1, 2, 5),
    splits: tuple[dict[str, Any], ...] = SPLITS,
    part: tuple[int, int] = (0, 1),
    **more: Any,
) -> dict[str, str]:
    """One part of so many of every schedule x split x M, in which any two of the three that there
    are meet, on this process group; says what differed, by case.
    """
    found = {}
    for name, options, count in one_part(part, SCHEDULES, splits, counts):
        inputs, targets = data(2 * count)
        model = whole(stages)
        expected = single_process(model, inputs, targets, count)
        with trainer(stages=stages, microbatches=count, schedule=name, **options, **more) as engine:
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
    with trainer(stages=stages, microbatches=count, max_grad_norm=max_norm, **more) as engine:
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
    with trainer(lambda _: Dropping(), stages=stages) as engine:
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
        return F.linear(left.t(), self.last.weight, self.last.bias) * (chosen[:, None] + 1)


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
        torch.autograd.backward(loss / 4)
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


def recorded(stages: int) -> tuple[list[str], list[str], bool]:
    """The timeline's actions on either rank, in order, and whether each starts before it ends."""
    inputs, targets = data(8)
    with trainer(stages=stages, microbatches=2, record=True) as engine:
        engine.step((inputs, targets))
        timeline = engine.timeline()
    rows = [[str(s.action) for s in timeline.spans if s.rank == rank] for rank in (0, 1)]
    ordered = all(span.start <= span.end for span in timeline.spans)
    return rows[0], rows[1], ordered


def automatic(**options: Any) -> dict[str, Any]:
    """Six steps under a schedule that changes after the third, against a single process."""
    found: dict[str, Any] = {"losses": True, "states": True}
    model = whole(4)
    optimizer = sgd(list(model.parameters()))
    names = []
    with trainer(stages=4, schedule="auto", stage_factory=None, **options) as engine:
        kinds = [action.kind for row in engine.schedule.ranks for action in row]
        found["wholes"] = kinds.count(ActionKind.BACKWARD)
        for step in range(6):
            inputs, targets = data(8, seed=step)
            expected = single_process(model, inputs, targets, 4)
            optimizer.step()
            optimizer.zero_grad()
            losses = engine.step((inputs, targets))
            found["losses"] &= torch.allclose(losses, expected, rtol=1e-5)
            names.append(engine.schedule.name)
        for index, state in engine.state_dict().items():
            for name, value in model[index].state_dict().items():
                found["states"] &= torch.allclose(state[name], value, atol=1e-6)
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, engine.schedule)
    return {**found, "names": names, "same": rows[0] == rows[1]}


def any_shape() -> dict[str, Any]:
    """Batches of one shape after another: same as one process, and two captures a stage."""
    found: dict[str, Any] = {"losses": True, "grads": True, "evaluated": True}
    with trainer(stage_factory=None, microbatches=2) as engine:
        for step, rows in enumerate((8, 4, 12, 16, 8, 20)):
            inputs, targets = data(rows, seed=step)
            model = whole(2)
            expected = single_process(model, inputs, targets, 2)
            batch = (inputs, targets) if engine.rank == 0 or step < 2 else (None, targets)
            found["losses"] &= torch.equal(engine.forward_backward(batch), expected)
            found["grads"] &= gradients_equal(engine.gradients(), model)
            found["evaluated"] &= torch.equal(engine.evaluate(batch), expected)
            for module in engine.modules.values():
                module.zero_grad()
        found["captures"] = [len(stage.captured) for stage in engine.stages.values()]
    return found


def one_rank_in_process() -> bool:
    """ranks=1 inside a larger process group talks to nobody."""
    inputs, targets = data(8)
    model = whole(3)
    single_process(model, inputs, targets, 4)
    if dist.get_rank() == 1:
        return True
    with trainer(stages=3, ranks=1) as engine:
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
        "grid 2": schedule_grid(2, part=(0, 3)),
        "grid 3": schedule_grid(3, part=(1, 3)),
        "clip 0.1": train_and_clip(3, 0.1),
        "clip 100": train_and_clip(2, 100.0),
        "evaluate": evaluate(2),
        "shared 2": shared(2),
        "shared 4": shared(4),
        "tied in a list": tied_in_a_list(),
        "not moved": some_are_not_moved(),
        "several": several_tensors(),
        "frozen 0": frozen(0),
        "frozen 1": frozen(1),
        "recorded": recorded(2),
        "one rank": one_rank_in_process(),
        "async": asynchronous(microbatches=2),
        # Behind its first step, the trainer knows that nothing was clipped.
    }


def with_split_stage() -> dict[str, Any]:
    """The same with the stages that ``autosplit.Stage`` makes."""
    return {
        "grid 2": schedule_grid(2, (3,), part=(0, 2), stage_factory=None),
        "grid 4": schedule_grid(4, (2,), part=(1, 2), backend="eager", stage_factory=None),
        "clip 0.1": train_and_clip(2, 0.1, stage_factory=None),
        "shared 3": shared(3, stage_factory=None),
        "several": several_tensors(stage_factory=None),
        "frozen 0": frozen(0, stage_factory=None),
        "frozen 1": frozen(1, stage_factory=None),
        "hooked": [hooked(), hooked(split_backward=False)],
        "autocast": autocast(),
        "auto": automatic(),
        "any shape": any_shape(),
    }


def three_ranks() -> dict[str, Any]:
    return {
        "grid 3": schedule_grid(3, part=(2, 3)),
        "grid 4": schedule_grid(4, (2,)),
        "shared 3": shared(3),
    }
