"""One rank's contenders, ready to take turns; stages that are alike are built and compiled once."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from autosplit.pipeline import RunOptions, StageOptions
from autosplit.pipeline.engine.stage_factory import SplitStage
from autosplit.pipeline.engine.stage_protocols import StageFactory, TrainableStage
from autosplit.ranks.groups import disconnect
from autosplit.runtime.options import SplitOptions
from autosplit.text.figures import spread
from autosplit.torch_internals.state import distinct_storage_bytes
from autosplit.trainer.trainer import PipelineTrainer
from examples.workload import Workload

from .contenders import Contender

K = TypeVar("K", bound=Hashable)

TIMEOUT = 300.0  # seconds; other ranks may be compiling
STEPS = 2  # in flight that a turn counts
WARM_UP = 2  # steps

_WARM_UP_AUTO = 4  # "auto" measures three before it has its schedule


class Rounds:
    """What rows have in common that hold the seconds of a step in each round."""

    rounds: Sequence[float]

    @property
    def seconds(self) -> float:
        """The median; 0 if it did not run."""
        return statistics.median(self.rounds or [0.0])

    @property
    def spread(self) -> float:
        """Between the quartiles."""
        return spread(self.rounds)


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one contender does on this rank.

    Attributes:
        step: one step; in flight, without waiting for other ranks.
        settle: waits for the steps in flight.
        in_flight: whether steps are.
        gradients: bytes of the gradients that a step makes here.
    """

    step: Callable[[], None]
    settle: Callable[[], None]
    in_flight: bool
    gradients: int

    def __call__(self) -> float:
        """Seconds of a step: until all ranks are done, or of this rank from one to the next."""
        dist.barrier()
        if not self.in_flight:
            start = time.perf_counter()
            self.step()
            dist.barrier()
            return time.perf_counter() - start
        self.step()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        seconds = (time.perf_counter() - start) / STEPS
        self.settle()
        return seconds


class Turns:
    """Makes contenders' turns, whatever M is.

    Args:
        workload: the model and its data.
        backend: how stages are run.

    Attributes:
        rank: this process's.
        ranks: how many there are.
    """

    def __init__(self, workload: Workload, backend: str) -> None:
        self._workload = workload
        self._backend = backend
        self._modules: dict[tuple[bool, int, int], nn.Module] = {}
        self._stages: dict[tuple[int, int], TrainableStage] = {}
        self._trainers: list[PipelineTrainer] = []
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def make(self, contender: Contender, microbatches: int) -> Turn | str:
        """A turn that has run its first steps, or on all ranks the error that it ended with."""
        batch = self._workload.batch_fn(0, microbatches * self._workload.microbatch_size)
        # Of its own, so that a rank that fails can leave the others nothing to wait for.
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        return attempt(
            lambda: self._made(contender, microbatches, batch, group),
            group,
            _WARM_UP_AUTO if contender.schedule == "auto" else WARM_UP,
            lambda: forget(self._modules.values()),
        )

    def close(self) -> None:
        """Give back what the turns so far have of process groups."""
        for trainer in self._trainers:
            trainer.close()
        self._trainers.clear()

    def _made(self, contender: Contender, microbatches: int, batch: Any, group: Any) -> Turn:
        if contender.ours:
            return self._ours(contender, microbatches, batch)
        return self._theirs(contender, microbatches, batch, group)

    def _ours(self, contender: Contender, microbatches: int, batch: Any) -> Turn:
        total = self.ranks * contender.chunks
        trainer = PipelineTrainer(
            lambda index: self._module(True, total, index),
            self._workload.loss_fn,
            torch.optim.SGD,
            stages=total,
            microbatches=microbatches,
            schedule=contender.schedule,
            stage_options=StageOptions(stage_factory=self._factory(total)),
            run_options=RunOptions(split_backward=contender.split_backward, timeout=TIMEOUT),
        )
        self._trainers.append(trainer)
        size = distinct_storage_bytes(_parameters(trainer.modules.values()))
        if contender.in_flight:
            flying: list[Any] = []

            def settle() -> None:
                while flying:
                    flying.pop(0).wait()

            return Turn(lambda: flying.append(trainer.step_async(batch)), settle, True, size)

        def step() -> None:
            trainer.forward_backward(batch)
            forget(trainer.modules.values())

        return Turn(step, _nothing, False, size)

    def _theirs(self, contender: Contender, microbatches: int, batch: Any, group: Any) -> Turn:
        rank, total = self.rank, self.ranks * contender.chunks
        held = [rank + chunk * self.ranks for chunk in range(contender.chunks)]
        if contender.v_shaped:
            held = [rank, total - 1 - rank]
        modules = [self._module(False, total, index) for index in held]
        stages = [
            PipelineStage(module, index, total, torch.device("cpu"), group=group)
            for module, index in zip(modules, held, strict=True)
        ]
        schedule = contender.schedule(
            stages if contender.chunks > 1 else stages[0],
            microbatches,
            loss_fn=self._workload.loss_fn,
        )
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()])
        inputs, targets = batch

        def step() -> None:
            args = (inputs,) if 0 in held else ()
            more = {"target": targets, "losses": []} if total - 1 in held else {}
            schedule.step(*args, **more)
            if contender.in_flight:
                optimizer.step()
            forget(modules)

        size = distinct_storage_bytes(_parameters(modules))
        return Turn(step, _nothing, contender.in_flight, size)

    def _module(self, ours: bool, total: int, index: int) -> nn.Module:
        key = (ours, total, index)
        if key not in self._modules:
            module = self._modules[key] = self._workload.stage_fn(index, total)
            if not ours and self._backend != "eager":
                module.compile(backend=self._backend)
        return self._modules[key]

    def _factory(self, total: int) -> StageFactory:
        """Makes a stage of a module or finds the one that was made of it before."""
        make = SplitStage(SplitOptions(backend=self._backend).in_pipeline())

        def factory(module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
            if (total, index) not in self._stages:
                self._stages[total, index] = make(module, args, index=index)
            return self._stages[total, index]

        return factory


def root_of(error: BaseException) -> BaseException:
    """What was behind it all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """The first line of what was behind it all."""
    error = root_of(error)
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:160]}"


def attempt(
    build: Callable[[], Turn],
    group: dist.ProcessGroup,
    warm_up: int,
    tidy: Callable[[], None],
    told: Callable[[BaseException], str] = first_line,
) -> Turn | str:
    """A turn that has run its first steps, or on all ranks the error that it ended with.

    Args:
        build: makes it.
        group: of all ranks, which nothing else uses; not usable after an error.
        warm_up: how many steps.
        tidy: called after an error.
        told: says what an error is.
    """
    failure = None
    try:
        turn = build()
        for _ in range(warm_up):
            turn.step()
        turn.settle()
    except Exception as error:
        failure = (time.time(), told(error))
        for other in range(dist.get_world_size()):
            if other != dist.get_rank():
                disconnect(group, other)
        tidy()
    failures = [each for each in gather(failure) if each is not None]
    return min(failures)[1] if failures else turn


def take_turns(
    ways: Mapping[K, Callable[[], float]], rounds: int, warm_up: int = 0
) -> dict[K, list[float]]:
    """The seconds that each tells of itself in each round, in another order in each; those of the
    first rounds are left out.
    """
    seconds: dict[K, list[float]] = {each: [] for each in ways}
    order, generator = list(ways), random.Random(0)  # the same on every rank
    for _ in range(warm_up + rounds):
        generator.shuffle(order)
        for way in order:
            seconds[way].append(ways[way]())
    return {way: each[warm_up:] for way, each in seconds.items()}


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [each for module in modules for each in module.parameters() if each.requires_grad]


def forget(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.zero_grad(set_to_none=True)


def _nothing() -> None:
    pass
