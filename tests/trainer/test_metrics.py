"""Metrics of a trainer's last step."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation import prepared
from autosplit.pipeline.simulation.simulate import Span
from autosplit.trainer.report_page import RankReport, page
from benchmarks.startup.restart import counted

WIDTH, SAMPLES = 16, 8


def linear_trainer(**options: Any) -> PipelineTrainer:
    """Two linear stages in one process."""
    return PipelineTrainer(
        [nn.Linear(WIDTH, WIDTH) for _ in range(2)],
        nn.functional.mse_loss,
        torch.optim.SGD,
        microbatches=4,
        ranks=1,
        **options,
    )


def test_metrics_of_a_step() -> None:
    batch = torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)
    with linear_trainer(max_grad_norm=1.0) as trainer:
        with pytest.raises(PipelineError, match="no metrics of the last step"):
            trainer.metrics()
        loss = trainer.step(batch).mean().item()
        result = trainer.metrics()
        assert (result["loss"], result["grad_norm"]) == (loss, trainer.grad_norm)
        assert result["samples_per_s"] * result["seconds"] == pytest.approx(SAMPLES)
        assert not {"idle", "peak_memory", "tokens_per_s", "mfu"} & result.keys()
        # Each Linear: F, the input gradient and the weight gradient; stage 0's input needs none.
        assert result["flops_per_s"] * result["seconds"] == pytest.approx(
            5 * 2 * SAMPLES * WIDTH * WIDTH
        )
        assert result["lr"] == 1e-3
        result = trainer.metrics(tokens=320, peak_flops="h100", mesh=True)
        assert result["tokens_per_s"] * result["seconds"] == pytest.approx(320)
        assert result["mfu"] == result["flops_per_s"] / 989e12
        with pytest.raises(PipelineError, match=r"expected one of a100, h100.*got 'h101'"):
            trainer.metrics(peak_flops="h101")
        trainer.record = "memory"
        trainer.step(batch)
        result, memory = trainer.metrics(), trainer.memory()
        assert result["idle"] == trainer.timeline().bubble_ratio(0)
        assert memory.peak_activations[0] < result["peak_memory"]
        assert result["peak_memory"] <= memory.fixed[0] + memory.peak_activations[0]
        # A norm makes step_async wait for the losses.
        loss = trainer.step_async(batch).wait().mean().item()
        result = trainer.metrics()
        assert (result["loss"], result["grad_norm"]) == (loss, trainer.grad_norm)
        assert result["idle"] == trainer.timeline().bubble_ratio(0)


@pytest.mark.parametrize("samples", [2 * SAMPLES, SAMPLES // 2])
def test_a_prediction_leaves_the_metrics_of_the_last_step(samples: int) -> None:
    batch = torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)
    other = torch.ones(samples, WIDTH), torch.zeros(samples, WIDTH)
    with linear_trainer() as trainer:
        trainer.step(batch)
        result = trainer.metrics()
        trainer.predict_memory(other)
        assert trainer.metrics() == result


def test_a_schedule_is_prepared_once_for_all_shapes() -> None:
    with (
        counted(prepared, "routes_of") as calls,
        PipelineTrainer(
            [nn.Linear(WIDTH, WIDTH)], nn.functional.mse_loss, torch.optim.SGD, microbatches=4
        ) as trainer,
    ):
        for rows in (4, 8, 12):
            trainer.step((torch.ones(rows, WIDTH), torch.zeros(rows, WIDTH)))
    assert calls.call_count == 1


def calls_in(work: Callable[[], object]) -> int:
    """The number of functions that are called, those of C included."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def test_metrics_and_the_bar_add_nothing_to_a_step_and_are_few_calls() -> None:
    batch = torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)
    with linear_trainer() as trainer:
        batches = iter(trainer.progress([batch] * 8))
        for _ in range(4):
            trainer.step(next(batches))
        step = calls_in(lambda: trainer.step(batch))
        trainer.metrics()
        assert calls_in(lambda: trainer.step(batch)) == step
        reports = calls_in(trainer.metrics) + calls_in(lambda: next(batches))
        assert reports < 0.02 * step


def test_step_async_without_a_norm_has_no_metrics() -> None:
    batch = torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)
    with PipelineTrainer(
        [nn.Linear(WIDTH, WIDTH)], nn.functional.mse_loss, torch.optim.SGD, microbatches=4, ranks=1
    ) as trainer:
        trainer.step(batch)
        trainer.step_async(batch).wait()
        with pytest.raises(PipelineError, match=r"step_async\(...\) has them with max_grad_norm"):
            trainer.metrics()


def test_a_profile_shows_actions_by_their_names_and_a_report_the_ranks() -> None:
    batch = torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    with PipelineTrainer(
        stages, nn.functional.mse_loss, torch.optim.SGD, microbatches=2, ranks=1
    ) as trainer:
        with pytest.raises(PipelineError, match="nothing to report yet"):
            trainer.report()
        trainer.step(batch)
        with torch.profiler.profile() as profile:
            trainer.step(batch)
        trainer.record = True
        trainer.step(batch)
        report = trainer.report()
    assert "2 stages on 1 rank, schedule '1f1b', 2 microbatches, split backward" in report
    # Two Linears of 16 x 16 in float32, with as many bytes of gradients, and no optimizer state.
    assert re.search(r"0 Linear, 1 Linear +2\.12 KiB +2\.12 KiB +0 B", report)
    assert "parameter               0        0  weight" in report
    assert "longest wait ms" in report
    ranges = {event.name for event in profile.events()}
    assert ranges >= {str(action) for row in trainer.schedule.ranks for action in row}


def test_progress_shows_steps_loss_and_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    batches = [(torch.ones(SAMPLES, WIDTH), torch.ones(SAMPLES, WIDTH))] * 2
    with PipelineTrainer(
        [nn.Linear(WIDTH, WIDTH)], nn.functional.mse_loss, torch.optim.SGD, microbatches=2, ranks=1
    ) as trainer:
        shown = []
        for batch in trainer.progress(batches):
            loss = trainer.step(batch).mean().item()
            shown.append(loss)
            time.sleep(0.15)  # a bar is drawn anew ten times a second at most
    bar = capsys.readouterr().err
    assert len(shown) == 2
    assert "training:  50%" in bar
    assert f"loss {shown[0]:.4g}, " in bar
    assert " samples/s" in bar


@pytest.mark.parametrize(("backward", "text"), [("B", "0B0 1B0"), ("I", "0I0 1I0")])
def test_a_report_names_the_action_that_a_rank_waited_for(backward: str, text: str) -> None:
    actions = {
        0: [("0F0", 0, 1), (f"0{backward}0", 5, 6)],
        1: [("1F0", 1, 2), (f"1{backward}0", 2, 5)],
    }
    rows = [
        RankReport(
            f"{rank} Linear",
            0,
            0,
            0,
            0,
            0,
            None,
            (),
            [
                Span(rank, Action.parse(name), float(start), float(end))
                for name, start, end in spans
            ],
        )
        for rank, spans in actions.items()
    ]
    schedule = build("1f1b", 2, 1, split_backward=backward == "I")
    last_row = page(schedule, StageDataflow(2), rows).splitlines()[-2]
    assert last_row.split("4,000.0")[-1].split() == text.split()
