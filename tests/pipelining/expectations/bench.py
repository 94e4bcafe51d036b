"""What cases are made of: stages on one rank or two, a step, and the same in one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
)

from autosplit.pipelining import SplitPipelineStage
from autosplit.torch_internals.distributed import csv_has_send_waits

from .layers import WIDTH, Chain, Layer

MICROBATCHES = 4
ROWS = 2 * MICROBATCHES

Loss = Callable[[Tensor, Tensor], Tensor]
sum_of_squares = nn.MSELoss(reduction="sum")

CASES: dict[str, Callable[[Bench], None]] = {}
"""By name; each runs on both ranks."""


def case(*variants: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a function of a bench to ``CASES``, or one for each variant, its second argument."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        name = f"{function.__module__.rpartition('.')[2]}: {function.__name__}"
        for each in variants:
            label = getattr(each, "__name__", str(each))
            CASES[f"{name}[{label}]"] = lambda bench, each=each: function(bench, each)
        if not variants:
            CASES[name] = function
        return function

    return add


@dataclasses.dataclass(frozen=True)
class Bench:
    """One rank of a case.

    Attributes:
        rank: 0 or 1.
        group: of both.
        alone: of this rank only.
    """

    rank: int
    group: dist.ProcessGroup
    alone: dist.ProcessGroup

    def stage(self, module: nn.Module, index: int, total: int, **options: Any) -> Any:
        """Ours, between both ranks."""
        return SplitPipelineStage(
            module, index, total, torch.device("cpu"), group=self.group, **options
        )

    def lone(self, module: nn.Module, index: int = 0, total: int = 1, **options: Any) -> Any:
        """Ours, on this rank only."""
        return SplitPipelineStage(
            module, index, total, torch.device("cpu"), group=self.alone, **options
        )

    def held(self, total: int) -> list[int]:
        """Every second stage."""
        return list(range(self.rank, total, 2))

    def stages(self, model: Chain, held: Sequence[int], **options: Any) -> list[Any]:
        """Stages of some of a model's layers."""
        total = len(model.layers)
        return [self.stage(model.layers[index], index, total, **options) for index in held]


class Training:
    """A model, a batch, and what one process makes of them.

    Args:
        layers: of the model.
        loss_fn: of a batch.
        keywords: of the first layer.
    """

    def __init__(
        self, *layers: nn.Module, loss_fn: Loss = sum_of_squares, **keywords: Tensor
    ) -> None:
        self.model = Chain(*layers)
        self.loss_fn = loss_fn
        self.keywords = keywords
        self.x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        self.target = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        reference = copy.deepcopy(self.model)
        self.out = reference(self.x, **keywords)
        self.loss = loss_fn(self.out, self.target)
        self.loss.backward()
        self.expected = [
            {name: each.grad for name, each in layer.named_parameters()}
            for layer in reference.layers
        ]

    @classmethod
    def of(cls, count: int, **options: Any) -> Training:
        """As many layers."""
        return cls(*(Layer() for _ in range(count)), **options)

    def step(self, schedule: Any, **more: Any) -> tuple[Any, list[Tensor]]:
        """One step: what the schedule returns, and the losses."""
        return self._call(schedule, schedule.step, **more)

    def evaluate(self, schedule: Any) -> tuple[Any, list[Tensor]]:
        """The same without a backward."""
        return self._call(schedule, schedule.eval)

    def _call(self, schedule: Any, call: Any, **more: Any) -> tuple[Any, list[Tensor]]:
        stages = stages_of(schedule)
        losses: list[Tensor] = []
        args: tuple[Tensor, ...] = ()
        if any(stage.is_first for stage in stages):
            args = (self.x,)
            more |= self.keywords
        if schedule._loss_fn is not None and any(stage.is_last for stage in stages):
            more |= {"target": self.target, "losses": losses}
        return call(*args, **more), losses

    def forget(self) -> None:
        """No gradients."""
        self.model.zero_grad(set_to_none=True)

    def check(self, held: Sequence[int], times: int = 1) -> None:
        """The gradients of these layers, after as many steps."""
        for index in held:
            layer = self.model.layers[index]
            for name, parameter in layer.named_parameters():
                expected = self.expected[index][name]
                assert expected is not None
                assert parameter.grad is not None, f"layer {index}: no gradient of {name}"
                torch.testing.assert_close(
                    parameter.grad,
                    times * expected,
                    msg=lambda text, at=(index, name): f"{at} {text}",
                )

    def check_result(self, schedule: Any, found: tuple[Any, list[Tensor]]) -> None:
        """Outputs and losses, where the last stage is."""
        out, losses = found
        if any(stage.is_last for stage in stages_of(schedule)):
            torch.testing.assert_close(out, self.out)
            torch.testing.assert_close(sum(losses), self.loss)
        else:
            assert out is None

    def run(self, schedule: Any, held: Sequence[int], steps: int = 2) -> None:
        """Steps without the gradients of the one before, then checks everything."""
        for _ in range(steps):
            self.forget()
            found = self.step(schedule)
        self.check_result(schedule, found)
        self.check(held)


def stages_of(schedule: Any) -> list[Any]:
    """Of this rank."""
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    stages: list[Any] = schedule._stages
    return stages


def over(schedule: Any, stages: Sequence[Any], count: int = MICROBATCHES, **options: Any) -> Any:
    """A schedule of torch's over stages of this rank; gradients are summed unless told."""
    options = {"loss_fn": sum_of_squares, "scale_grads": False, **options}
    single = issubclass(schedule, PipelineScheduleSingle)
    return schedule(stages[0] if single else list(stages), count, **options)


def ordered(
    stages: Sequence[Any], rows: Mapping[int, str], count: int, form: str = "compute_only"
) -> Any:
    """torch's runtime over every rank's actions, in their text form with spaces between them."""
    runtime = over(_PipelineScheduleRuntime, stages, count)
    actions = {
        rank: [_Action.from_str(each) for each in [*row.split(), *_waits(row)]]
        for rank, row in rows.items()
    }
    runtime._prepare_schedule_with_comms(actions, format=form)
    return runtime


def _waits(row: str) -> list[str]:
    """For the sends of a row, which torch wants to be waited for from 2.15 on."""
    sends = [each for each in row.split() if "SEND" in each]
    return [each.replace("SEND", "WAIT_SEND") for each in sends if csv_has_send_waits()]


@contextlib.contextmanager
def no_leaked_tensors() -> Iterator[None]:
    """No tensor that is made and dropped inside is held by a cycle of references."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        # By type: isinstance would look through weak references.
        leaked = [
            f"{type(each).__name__} {[*each.shape]}"
            for each in gc.garbage
            if issubclass(type(each), Tensor)
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not leaked, f"{len(leaked)} tensors in cycles, such as {leaked[0]}"
