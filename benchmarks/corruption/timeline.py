"""A step in which an audit finds a fault, drawn: what ran, what ran again, and what was wrong."""

from __future__ import annotations

import contextlib
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from matplotlib.patches import Patch
from torch import Tensor, nn

from autosplit.pipeline import PipelineTrainer, RunOptions
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Span, Timeline
from autosplit.report import timeline_figure
from autosplit.runtime.functions import SplitFunctions

from .faults import Fault, happening

RANKS, MICROBATCHES, WIDTH = 4, 6, 16
FAULTY = "2B2"
_SECONDS = 0.02


class Layer(nn.Module):
    """A layer whose F and B take no time by themselves."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x)
        return result


def _sleeping(name: str, seconds: float) -> Any:
    """A patch by which F or B also sleeps, so that four ranks run on any two cores."""
    original = getattr(SplitFunctions, name)

    def call(*args: Any) -> Any:
        results = original(*args)
        time.sleep(seconds)
        return results

    return mock.patch.object(SplitFunctions, name, call)


def run() -> dict[str, Any]:
    """Train until an audit finds the fault; what this rank did in that step."""
    options = RunOptions(audit="mark", record=True, split_backward=False)
    batch = torch.randn(2, 4 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(_sleeping("run", _SECONDS))
        stack.enter_context(_sleeping("backward", 2 * _SECONDS))
        trainer = stack.enter_context(
            PipelineTrainer(
                Layer,
                F.mse_loss,
                lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
                stages=RANKS,
                microbatches=MICROBATCHES,
                run_options=options,
            )
        )
        for _ in range(3):
            trainer.step((batch[0], batch[1]))
        auditor: Any = trainer.auditor
        fault = Fault("weight gradient", RANKS, 0)
        stack.enter_context(happening(fault, trainer, Action.parse(FAULTY)))
        for _ in range(auditor.period):
            trainer.step((batch[0], batch[1]))
            if auditor.marks:
                break
        timeline = trainer.timeline()
        ran, again = (
            [_row(span) for span in spans if span.rank == trainer.rank]
            for spans in (timeline.spans, timeline.audits)
        )
        return {
            "name": f"rank {trainer.rank}",
            "ran": ran,
            "again": again,
            "text": auditor.marks[0],
        }


def _row(span: Span) -> tuple[str, float, float]:
    return str(span.action), span.start, span.end


def measure(launched: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """A row for each rank; leaves the picture beside the page."""
    rows = launched(run, RANKS, (), timeout=120.0)
    draw(rows, pathlib.Path(__file__).parent / "timeline.png")
    yield from rows


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw the step: audits hatched, and the faulty action framed where it ran and ran again."""
    ran, again = ([*_spans(rows, key)] for key in ("ran", "again"))
    faulty = Action.parse(FAULTY)
    title = f"{FAULTY} computes a wrong bit, and rank {faulty.stage} finds it where it waits"
    timeline = Timeline(RANKS, tuple(ran), audits=tuple(again))
    figure = timeline_figure([("", timeline)], title=title, marked=[faulty])
    wrong = Patch(facecolor="white", edgecolor="red", linewidth=2.5, label="has a wrong bit")
    figure.legend(handles=[wrong], loc="outside lower right", frameon=False)
    figure.savefig(path, dpi=150)


def _spans(rows: list[dict[str, Any]], key: str) -> Iterator[Span]:
    for rank, row in enumerate(rows):
        for text, start, end in row[key]:
            yield Span(rank, Action.parse(text), start, end)
