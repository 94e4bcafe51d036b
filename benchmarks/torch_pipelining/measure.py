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

from autosplit.compare.example import call_factory
from autosplit.ranks.launch import launch
from examples.workload import Workload

from ..page import option
from ..pipeline.turns import TIMEOUT, WARM_UP, Turn, attempt, forget, gather, root_of, take_turns
from .activations import activation_peak
from .contenders import CONTENDERS, ENTRIES, INSTEAD, UNDONATED, Entry, Step, Task

COUNTS = (2, 4, 8)
RANKS = 2
FACTORY = "examples.models:llama_workload"


@dataclasses.dataclass(frozen=True)
class Row:
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
        error: why it did not run.
    """

    name: str
    schedule: str
    split: bool
    microbatches: int
    contender: str
    rounds: Sequence[float] = ()
    peak: int = 0
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
    field = Field(call_factory(FACTORY, settings.model))
    return [
        row
        for schedule in settings.schedules
        for count in settings.microbatches
        for row in field.compare(ENTRIES[schedule], count, settings.contenders, settings.rounds)
    ]


@dataclasses.dataclass(frozen=True)
class _Made:
    """A contender that has run: its turn, and its modules by stage."""

    turn: Turn
    modules: Mapping[int, nn.Module]


class Field:
    """One rank's contenders.

    Args:
        workload: the model and its data.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._modules: dict[tuple[str, int, int], nn.Module] = {}

    def compare(
        self, entry: Entry, count: int, contenders: Sequence[str], rounds: int
    ) -> list[Row]:
        """A row for each contender under one schedule with so many microbatches."""
        with contextlib.ExitStack() as closing:
            made: dict[str, _Made | str] = {}
            for name in contenders:
                if name not in INSTEAD or isinstance(made.get(INSTEAD[name]), str):
                    made[name] = self._make(name, entry, count, closing)
            ready = {name: each.turn for name, each in made.items() if isinstance(each, _Made)}
            seconds = take_turns(ready, rounds)
            rows = [
                _row(name, entry, count, each, seconds.get(name, [])) for name, each in made.items()
            ]
        gc.collect()
        return rows

    def _make(
        self, name: str, entry: Entry, count: int, closing: contextlib.ExitStack
    ) -> _Made | str:
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        closing.callback(dist.destroy_process_group, group)
        workload = self._workload
        build = functools.partial(self._module, name, RANKS * entry.chunks)
        batch = workload.batch_fn(0, count * workload.microbatch_size)
        task = Task(entry, count, build, workload.loss_fn, batch, group, closing)
        modules = {index: build(index) for index in task.held}
        donated = name != UNDONATED

        def turn() -> Turn:
            with _donating(donated):
                step: Step = CONTENDERS[name](task)

            def forgetting() -> None:
                with _donating(donated):
                    step()
                forget(modules.values())

            return Turn(forgetting, lambda: None, False, 0)

        if name in INSTEAD:
            # What is compiled is found again by the module's code, whatever the settings.
            torch._dynamo.reset()
            closing.callback(torch._dynamo.reset)
        found = attempt(turn, group, WARM_UP, lambda: forget(modules.values()), _verbatim)
        return found if isinstance(found, str) else _Made(found, modules)

    def _module(self, contender: str, total: int, index: int) -> nn.Module:
        key = (contender, total, index)
        if key not in self._modules:
            self._modules[key] = self._workload.stage_fn(index, total)
        return self._modules[key]


def _row(name: str, entry: Entry, count: int, made: _Made | str, seconds: list[float]) -> Row:
    row = Row(f"{entry.name}, M={count}: {name}", entry.name, entry.split, count, name)
    if isinstance(made, str):
        return dataclasses.replace(row, error=made)
    slower = [max(each) for each in zip(*gather(seconds), strict=True)]
    peaks = gather(activation_peak(made.turn.step, made.modules.values()))
    return dataclasses.replace(row, rounds=slower, peak=max(peaks))


def _donating(on: bool) -> contextlib.AbstractContextManager[None]:
    """A global setting of torch, under which one contender is compiled and runs."""
    found: contextlib.AbstractContextManager[None] = torch._functorch.config.patch(
        donated_buffer=on
    )
    return found


def _verbatim(error: BaseException) -> str:
    """What was behind it all, as it was said."""
    error = root_of(error)
    return f"{type(error).__name__}: {str(error).strip()}"
