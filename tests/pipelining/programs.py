"""One model under a schedule of torch's, and the whole of it by plain autograd."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from autosplit.pipelining import SplitPipelineStage
from tests.zoo import Made

CPU = torch.device("cpu")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")

Make = Callable[..., Any]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def block(size: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))


def around(make: Make) -> nn.Module:
    """Whatever ``make`` makes of a block and of the inputs."""
    return Made(lambda m, *args, **kwargs: make(m.inner, *args, **kwargs), inner=block())


def held(kind: str, stages: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """This rank's stages."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if kind in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


@dataclass
class Program:
    """A model in stages and what it is trained with, the same on every rank.

    Attributes:
        parts: the stages' modules.
        kind: the schedule, a class of torch's.
        microbatches: how many.
        args: of the first stage.
        kwargs: of every stage.
        target: of the loss.
        loss: ``loss(output, target, **loss_kwargs)``.
        options: of the stages.
        schedule_options: of the schedule.
        make_schedule: makes it, where it is no class of torch's.
        reverse: whether backwards run from the last microbatch to the first.
        cut: cuts the batch for plain autograd.
        stage: makes a stage.
        mine: this rank's stages; those that the schedule puts here where none are named.
    """

    parts: Sequence[nn.Module]
    kind: str = "Schedule1F1B"
    microbatches: int = 4
    args: Sequence[Tensor] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Tensor | None = None
    loss: Callable[..., Tensor] = mean_square
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    schedule_options: dict[str, Any] = field(default_factory=dict)
    make_schedule: Make | None = None
    reverse: bool = False
    cut: Callable[[Tensor, int], Sequence[Tensor]] = torch.tensor_split
    stage: Make = SplitPipelineStage
    mine: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.plain = copy.deepcopy(list(self.parts))
        group = self.options.get("group")
        self.mine = self.mine or held(self.kind, len(self.parts), group)
        self.stages = [
            self.stage(self.parts[at], at, len(self.parts), CPU, **self.options) for at in self.mine
        ]
        self.schedule = self._schedule()
        self.output: Any = None
        self.losses: list[Tensor] = []

    def _schedule(self) -> Any:
        inputs: dict[str, Any] = {"loss_fn": self.loss, **self.schedule_options}
        if self.make_schedule is not None:
            return self.make_schedule(self.stages, self.microbatches, **inputs)
        kind = getattr(schedules, self.kind)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        return kind(self.stages[0] if single else self.stages, self.microbatches, **inputs)

    @property
    def last(self) -> bool:
        return len(self.parts) - 1 in self.mine

    def step(self, run: str = "step", **more: Any) -> Any:
        """One step of the schedule, or its ``eval``."""
        inputs: dict[str, Any] = {**self.kwargs, **more}
        if self.last:
            self.losses = []
            inputs |= {"target": self.target, "losses": self.losses}
        if self.loss_kwargs:  # torch 2.11 takes none
            inputs["loss_kwargs"] = self.loss_kwargs
        self.output = getattr(self.schedule, run)(*(self.args if 0 in self.mine else ()), **inputs)
        return self.output

    def plain_step(self) -> list[Any]:
        """The same by plain autograd, into the gradients of ``plain``; the outputs."""
        count = self.microbatches
        scaled = self.schedule_options.get("scale_grads", True)
        parameters = list({id(p): p for part in self.plain for p in part.parameters()}.values())
        earlier = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        results = [self.plain_forward(at) for at in range(count)]
        assert self.target is not None
        targets = self.target.tensor_split(count)
        losses = [
            self.loss(result, target, **self.loss_kwargs)
            for result, target in zip(results, targets, strict=True)
        ]
        for loss in reversed(losses) if self.reverse else losses:
            if loss.requires_grad:
                loss.backward()
        for p, initial in zip(parameters, earlier, strict=True):
            if p.grad is not None:
                p.grad = p.grad.div_(count) if scaled else p.grad
                p.grad = p.grad if initial is None else initial.add_(p.grad)
            else:
                p.grad = initial
        return results

    def plain_forward(self, at: int) -> Any:
        """The whole model on one microbatch."""
        count = self.microbatches
        value: Any = tuple(self.cut(argument, count)[at] for argument in self.args)
        options = {
            name: item.tensor_split(count)[at] if isinstance(item, Tensor) else item
            for name, item in self.kwargs.items()
        }
        for part in self.plain:
            value = part(*value, **options)
            if part is not self.plain[-1] and type(value) is not tuple:
                value = (value,)
        return value

    def differences(self) -> list[str]:
        """Parameters and buffers of this rank's stages that are not as after plain autograd."""
        results = []
        for at in self.mine:
            pairs = zip(self.parts[at].named_parameters(), self.plain[at].parameters(), strict=True)
            for (name, mine), other in pairs:
                results += _difference(f"gradient of {name} of stage {at}", mine.grad, other.grad)
            buffers = zip(self.parts[at].named_buffers(), self.plain[at].buffers(), strict=True)
            for (name, buffer), other in buffers:
                results += _difference(f"{name} of stage {at}", buffer, other)
        return results

    def run(self, steps: int = 1, **more: Any) -> list[str]:
        """Run steps here and by plain autograd; return differences and leftovers."""
        result = []
        for _ in range(steps):
            self.step(**more)
            results = self.plain_step()
            if self.last and more.get("return_outputs", True):
                result += outputs_differ(self.output, results)
        for stage in self.stages:
            left = [[*stage._saved], [*stage._weights.in_flight]]
            left += [stage._losses, stage._roots]
            left += [stage.output_chunks] if not stage.is_last else []
            result += [f"{stage.stage_index} kept {item}" for item in left if item]
        return result + self.differences()


def trained(*parts: nn.Module, rows: int = 8, **more: Any) -> Program:
    """A program of four features a row."""
    data = {"args": [torch.randn(rows, 4)], "target": torch.randn(rows, 4), **more}
    return Program([*parts], **data)


def _difference(what: str, mine: Tensor | None, other: Tensor | None) -> list[str]:
    if mine is None or other is None:
        return [] if mine is other else [f"{what}: {mine} instead of {other}"]
    mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
    if torch.equal(mine, other):
        return []
    worst = (mine.double() - other.double()).abs().max().item()
    return [f"{what} differs by {worst:.3g}"]


def outputs_differ(output: Any, results: Iterable[Any]) -> list[str]:
    mine, form = tree_flatten(output)
    theirs, forms = zip(*map(tree_flatten, results), strict=True)
    result = [] if {*forms} == {form} else [f"returned {output}"]
    for at, (one, remaining) in enumerate(zip(mine, zip(*theirs, strict=True), strict=True)):
        whole = torch.cat([other.detach() for other in remaining])
        result += _difference(f"output {at}", one, whole)
        if one.requires_grad:
            result.append(f"output {at} holds a graph")
    return result


@contextlib.contextmanager
def no_leaked_tensors() -> Iterator[None]:
    """No tensor that is made and dropped inside is held by a cycle of references."""
    gc.freeze()  # the collector then looks only at objects that are made inside
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        leaked = [[*item.shape] for item in gc.garbage if _is_tensor(item)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
    assert not leaked, f"{len(leaked)} tensors in cycles, such as one of {leaked[0]}"


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), Tensor)  # isinstance would look through weak references
