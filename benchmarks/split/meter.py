"""Bytes alive after each action, and the most inside it, as the allocator saw them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .contenders import ACTIONS, Around, Contender, microbatch
from .models import Subject
from .reference import distinct_bytes

Run = Callable[[Around], None]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Level:
    """Bytes above what was alive before the microbatch.

    Attributes:
        held: at the end of an action, the parameters' gradients so far left out.
        peak: the most inside the action, everything counted.
    """

    held: int
    peak: int


def levels(contender: Contender, subject: Subject) -> dict[str, Level]:
    """One microbatch, action by action; run one before, so that caches are filled.

    On CUDA the caching allocator's own counters; on the CPU the allocator's events, which the
    profiler records. Compiled kernels and eager operators alike allocate there.
    """
    gc.collect()
    measure = _on_cuda if subject.x.device.type == "cuda" else _on_cpu
    gradients: dict[str, int] = {}

    def run(around: Around) -> None:
        @contextlib.contextmanager
        def counted(action: str) -> Iterator[None]:
            with around(action):
                yield
            gradients[action] = distinct_bytes(contender.gradients().values())

        microbatch(contender, subject, counted)

    found = measure(run)
    contender.clear()
    return {
        action: Level(after - gradients[action], peak) for action, (after, peak) in found.items()
    }


def extra(prepare: Callable[[], T], call: Callable[[T], None], device: torch.device) -> int:
    """The most bytes alive inside ``call(prepare())``, above what was alive when it began."""
    if device.type == "cuda":
        prepared = prepare()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(prepared)
        return int(torch.cuda.max_memory_allocated() - start)
    # The profiler misses the end of what began before it.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepared = prepare()
        with record_function("measured call"):
            call(prepared)
    events = _trace(profiler)
    (start,) = (each["ts"] for each in events if each["name"] == "measured call")
    changes = [each for each in events if each["name"] == "[memory]" and each["ts"] >= start]
    changes.sort(key=itemgetter("ts"))
    levels = itertools.accumulate((int(each["args"]["Bytes"]) for each in changes), initial=0)
    return max(levels)


def _on_cuda(run: Run) -> dict[str, tuple[int, int]]:
    start = torch.cuda.memory_allocated()
    found: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def around(action: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        peak = torch.cuda.max_memory_allocated()
        found[action] = (torch.cuda.memory_allocated() - start, peak - start)

    run(around)
    return found


def _on_cpu(run: Run) -> dict[str, tuple[int, int]]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(lambda action: record_function(f"action {action}"))
    events = _trace(profiler)
    ends = {each["name"]: each["ts"] + each["dur"] for each in events if "dur" in each}
    changes = [(each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]"]
    changes.sort(key=itemgetter(0), reverse=True)
    found = {}
    level = 0
    for action in ACTIONS:
        peak = level
        while changes and changes[-1][0] <= ends[f"action {action}"]:
            level += changes.pop()[1]
            peak = max(peak, level)
        found[action] = (level, peak)
    return found


def _trace(profiler: profile) -> list[dict[str, Any]]:
    """The profiler's events; only the trace that it exports lists allocations one by one."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        return events
