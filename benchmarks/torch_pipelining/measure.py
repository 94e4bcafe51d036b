"""Every contender under every schedule, taking turns on two ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autosplit.compare import Workload
from autosplit.compare.example import load_workload
from autosplit.pipeline.engine.launch import launch

from ..page import option
from ..pipeline.turns import (
    TIMEOUT,
    WARM_UP,
    Rounds,
    Turn,
    attempt,
    gather,
    root_of,
    take_turns,
)
from .activations import activation_peak
from .contenders import CONTENDERS, Contender
from .gradients import Gradients, difference, gradients_of, reference
from .schedules import ENTRIES, Entry
from .task import Step, Task

COUNTS = (2, 4, 8)
RANKS = 2
FACTORY = "examples.models:llama"


@dataclasses.dataclass(frozen=True)
class Row(Rounds):
    """What one contender took.

    Attributes:
        name: schedule, M and contender.
        schedule: its name.
        split: whether it has I and W.
        microbatches: M.
        contender: its name.
        rounds: seconds of its step in each round, those of the slower rank.
        peak: bytes that a step holds at its most beyond parameters and gradients, on the rank where
            that is more.
        difference: of its gradients from those of plain autograd, see ``gradients.difference``.
        error: why it did not run.
    """

    name: str
    schedule: str
    split: bool
    microbatches: int
    contender: str
    rounds: Sequence[float] = ()
    peak: int = 0
    difference: float = 0.0
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured."""

    schedules: tuple[str, ...] = option((*ENTRIES,), "of torch's", ENTRIES)
    microbatches: tuple[int, ...] = option(COUNTS, "M")
    contenders: tuple[str, ...] = option((*CONTENDERS,), "who takes turns", CONTENDERS)
    rounds: int = option(5, "turns of each contender")
    seq: int = option(128, "tokens a sample; actions take 20 ms and more")
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def model(self) -> dict[str, str]:
        """What is not as in the workload."""
        return {"seq": str(self.seq), **self.overrides}


def measure_all(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each schedule, M and contender."""
    model = ", ".join(f"{name} {value}" for name, value in settings.model.items())
    for row in measure(settings):
        yield {**dataclasses.asdict(row), "settings": model}


def measure(settings: Settings) -> list[Row]:
    """All of it in one launch."""
    return launch(_on_rank, RANKS, (settings,), timeout=3600.0)[0]


def _on_rank(settings: Settings) -> list[Row]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # torch logs the whole schedule with each error that is expected
    field = Field(load_workload(FACTORY, settings.model))
    contenders = [CONTENDERS[name] for name in settings.contenders]
    return [
        row
        for schedule in settings.schedules
        for count in settings.microbatches
        for row in field.compare(ENTRIES[schedule], count, contenders, settings.rounds)
    ]


class Field:
    """One rank's contenders.

    Args:
        workload: the model and its data.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._modules: dict[tuple[str, int, int], nn.Module] = {}
        self._expected: dict[tuple[int, int], Gradients] = {}

    def compare(
        self, entry: Entry, count: int, contenders: Sequence[Contender], rounds: int
    ) -> list[Row]:
        """A row for each contender under one schedule with so many microbatches."""
        with contextlib.ExitStack() as closing:
            made: dict[str, _Made | str] = {}
            for each in contenders:
                if each.instead_of and not isinstance(made.get(each.instead_of), str):
                    continue
                made[each.name] = self._make(each, entry, count, closing)
            ready = {name: each.turn for name, each in made.items() if isinstance(each, _Made)}
            seconds = take_turns(ready, rounds)
            rows = [
                self._row(name, entry, count, each, seconds.get(name, []))
                for name, each in made.items()
            ]
        gc.collect()
        return rows

    def _make(
        self, contender: Contender, entry: Entry, count: int, closing: contextlib.ExitStack
    ) -> _Made | str:
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        closing.callback(dist.destroy_process_group, group)
        total = RANKS * entry.chunks
        task = Task(
            entry,
            dist.get_rank(),
            RANKS,
            count,
            functools.partial(self._module, contender.name, total),
            self._workload.loss_fn,
            self._batch(count),
            group,
            closing,
        )
        modules = {index: task.build(index) for index in task.held}
        made: list[Step] = []

        def build() -> Turn:
            step = _settled(contender, task)
            made.append(step)

            def forgetting() -> None:
                step()
                _forget(modules)

            return Turn(forgetting, _nothing, False, 0)

        if contender.instead_of:
            # What is compiled is found again by the module's code, whatever the settings.
            torch._dynamo.reset()
            closing.callback(torch._dynamo.reset)
        turn = attempt(build, group, WARM_UP, lambda: _forget(modules), _verbatim)
        if isinstance(turn, str):
            return turn
        return _Made(turn, made[0], modules)

    def _row(
        self, name: str, entry: Entry, count: int, made: _Made | str, seconds: list[float]
    ) -> Row:
        row = Row(f"{entry.name}, M={count}: {name}", entry.name, entry.split, count, name)
        if isinstance(made, str):
            return dataclasses.replace(row, error=made)
        slower = [max(each) for each in zip(*gather(seconds), strict=True)]
        made.step()
        found = {index: gradients_of(module) for index, module in made.modules.items()}
        expected = self._reference(RANKS * entry.chunks, count)
        differences = gather(difference(found, expected))
        _forget(made.modules)
        peaks = gather(activation_peak(made.step, made.modules.values()))
        _forget(made.modules)
        return dataclasses.replace(
            row,
            rounds=slower,
            peak=max(peaks),
            difference=max(differences),
        )

    def _module(self, contender: str, total: int, index: int) -> nn.Module:
        key = (contender, total, index)
        if key not in self._modules:
            self._modules[key] = self._workload.stage_fn(index, total)
        return self._modules[key]

    def _batch(self, count: int) -> Any:
        return self._workload.batch_fn(0, count * self._workload.microbatch_size)

    def _reference(self, total: int, count: int) -> Gradients:
        key = (total, count)
        if key not in self._expected:
            modules = [self._workload.stage_fn(index, total) for index in range(total)]
            self._expected[key] = reference(
                modules, self._batch(count), count, self._workload.loss_fn
            )
        return self._expected[key]


@dataclasses.dataclass(frozen=True)
class _Made:
    """A contender that has run: its turn, one step of it, and its modules by stage."""

    turn: Turn
    step: Step
    modules: Mapping[int, nn.Module]


def _settled(contender: Contender, task: Task) -> Step:
    """Its step under the global setting of torch that it chose, with which nobody else runs."""
    config = torch._functorch.config
    with config.patch(donated_buffer=config.donated_buffer):
        step = contender.prepare(task)
        chosen = config.donated_buffer

    def settled() -> None:
        with config.patch(donated_buffer=chosen):
            step()

    return settled


def _verbatim(error: BaseException) -> str:
    """What was behind it all, as it was said."""
    error = root_of(error)
    return f"{type(error).__name__}: {str(error).strip()}"


def _forget(modules: Mapping[int, nn.Module]) -> None:
    for module in modules.values():
        module.zero_grad(set_to_none=True)


def _nothing() -> None:
    pass
