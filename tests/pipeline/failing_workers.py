"""Runs for spawned processes that end badly."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.training.parameter_workers import Tied
from tests.pipeline.workers import ENDS, WIDTH, block, data, outcomes, sgd, trainer


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
        output: Tensor = self.block(x)
        return output


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


class Vanishing(Growing):
    """Puts out nothing after the second microbatch."""

    def forward(self, x: Tensor) -> Any:
        return self.block(x) if next(self._calls) < 2 else ()


class Widening(Growing):
    """Puts out float64 after the second microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x if next(self._calls) < 2 else x.double()


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


def _optimizer_of_others(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return sgd([*parameters, *block(7).parameters()])


def _code_around_fails() -> None:
    with trainer() as engine:
        engine.step(data(8))
        if engine.rank == 1:
            raise OSError("disk full")
        engine.step(data(8))


def _step(batch: Any = None, **options: Any) -> None:
    trainer(**options).step(data(8) if batch is None else batch)


def _evaluate() -> None:
    """The third microbatch of the second evaluation fails; none has run the module before."""
    engine = trainer(lambda index: Trip(6, ENDS["raise"]) if index == 1 else block(index))
    for _ in range(2):
        engine.evaluate(data(8))


def trip_stage(index: int) -> nn.Module:
    return Trip(2, ENDS["raise"]) if index == 1 else block(index)


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scale * (output - target) ** 2).mean()


def _unfrozen() -> None:
    with trainer([block(0).requires_grad_(False), block(1)]) as engine:
        engine.step(data(8))
        if 0 in engine.modules:
            engine.modules[0].get_parameter("0.bias").requires_grad_()
        engine.step(data(8))


def _replaced() -> None:
    with trainer() as engine:
        engine.step(data(8))
        for index, module in engine.modules.items():
            module.load_state_dict(block(index).state_dict(), assign=True)
        engine.step(data(8))


def _leaves_early() -> None:
    """Rank 1's batches end before those of rank 0."""
    with trainer() as engine:
        engine.step(data(8))
        if engine.rank == 0:
            engine.step(data(8))


def _different(**options: tuple[Any, Any]) -> None:
    _step(**{name: values[dist.get_rank()] for name, values in options.items()})


def _tied(names: list[tuple[int, str]], width: int = WIDTH) -> None:
    trainer(lambda index: Tied(index, WIDTH + index * (width - WIDTH)), shared_parameters=[names])


def _tied_with_hook() -> None:
    with trainer(Tied, shared_parameters=[[(0, "tied"), (1, "tied")]]) as engine:
        if 1 in engine.modules:
            engine.modules[1].get_parameter("tied").register_hook(lambda grad: 0 * grad)
        engine.step(data(8))


def _late_hook(index: int) -> nn.Module:
    module = block(index)
    if index == 0:
        module.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda _: None)
    return module


SCENARIOS: dict[str, Callable[[], None]] = {
    "forward": functools.partial(_step, model=trip_stage),
    "memory": functools.partial(
        _step,
        model=lambda index: Trip(1, ENDS["exhaust"]) if index == 1 else block(index),
    ),
    "dtype between stages": functools.partial(
        _step, model=lambda index: Widening() if index == 0 else block(1)
    ),
    "weight": functools.partial(_step, stage_factory=WeightTrip),
    "factory": functools.partial(_step, model=_factory_fails),
    "optimizer": functools.partial(_step, optimizer_fn=_optimizer_fails),
    "foreign parameters": functools.partial(_step, optimizer_fn=_optimizer_of_others),
    "no optimizer": functools.partial(_step, optimizer_fn=lambda parameters: None),
    "code around": _code_around_fails,
    "shape between stages": functools.partial(
        _step, model=lambda index: Growing() if index == 0 else block(1)
    ),
    "fewer outputs": functools.partial(
        _step, model=lambda index: Vanishing() if index == 0 else block(1)
    ),
    "evaluation": lambda: _evaluate(),
    "slow": functools.partial(
        _step,
        model=lambda index: Trip(1, ENDS["nap"]) if index == 1 else block(index),
        timeout=2.0,
    ),
    "loss": functools.partial(_step, loss_fn=lambda output, target: output - target),
    "loss is a number": functools.partial(
        _step, loss_fn=lambda output, target: 3.0, stage_factory=None
    ),
    "loss is an item": functools.partial(
        _step, loss_fn=lambda output, target: (output - target).mean().item(), stage_factory=None
    ),
    "loss is nothing": functools.partial(
        _step, loss_fn=lambda output, target: None, stage_factory=None
    ),
    "wants a closure": functools.partial(_step, optimizer_fn=torch.optim.LBFGS),
    "loss without gradient": functools.partial(_step, loss_fn=lambda output, target: target.mean()),
    "tied name": lambda: _tied([(0, "tied"), (1, "weight")]),
    "tied stage": lambda: _tied([(0, "tied"), (2, "tied")]),
    "tied alone": lambda: _tied([(0, "tied")]),
    "tied twice": lambda: _tied([(0, "tied"), (1, "tied"), (0, "tied")]),
    "tied shapes": lambda: _tied([(0, "tied"), (1, "tied")], width=8),
    "tied with a hook": lambda: _tied_with_hook(),
    "late hook": functools.partial(_step, model=_late_hook, stage_factory=None),
    "loss with a parameter": functools.partial(_step, loss_fn=Weighted()),
    "unfrozen": lambda: _unfrozen(),
    "replaced": lambda: _replaced(),
    "other norm": functools.partial(_different, max_grad_norm=(None, 1.0)),
    "other count": functools.partial(_different, microbatches=(2, 4)),
    "other schedule": functools.partial(_different, schedule=("1f1b", "gpipe")),
    "other accumulation": functools.partial(
        _different, accumulation=("fused", None), stage_factory=(None, None)
    ),
    "other backend": functools.partial(
        _different, backend=("eager", "inductor"), stage_factory=(None, None)
    ),
    "other gradients": functools.partial(
        _different, grad_dtype=(None, torch.float64), stage_factory=(None, None)
    ),
    "other factory": functools.partial(_different, stage_factory=(ReferenceStage, None)),
    "leaves early": lambda: _leaves_early(),
    "other tied": functools.partial(
        _different, shared_parameters=([], [[(0, "0.bias"), (1, "0.bias")]])
    ),
    "no timeline": lambda: print(trainer().timeline()),
    "no module": functools.partial(_step, model=lambda index: index),
    "world size": functools.partial(_step, model=[block(0)]),
    "ranks": functools.partial(_step, stages=3, ranks=3),
}


def after_a_failure() -> dict[str, Any]:
    """What a failed step leaves: optimizers untouched, a trainer that says it has ended."""
    engine = trainer(trip_stage)
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


def other_values() -> dict[str, list[str]]:
    """What is said of batches of other values, by what of them differs; training goes on."""
    inputs, targets = data(8)
    rank = dist.get_rank()
    batches = {
        "same": (inputs.clone(), targets.clone()),
        "all": data(8, seed=rank),
        "inputs": (inputs + rank, targets),
        "last sample": (inputs, torch.cat([targets[:-1], targets[-1:] + rank])),
        "left out": (inputs, None) if rank == 0 else (None, targets),
    }
    return {name: _warned(batch) for name, batch in batches.items()}


def _warned(batch: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, trainer() as engine:
        warnings.simplefilter("always")
        engine.evaluate(batch)
        engine.step(batch)
        engine.step(batch)
    return [f"{each.category.__name__}: {each.message}" for each in caught]


def all_that_fails() -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    return outcomes(SCENARIOS), {**after_a_failure(), "other values": other_values()}
