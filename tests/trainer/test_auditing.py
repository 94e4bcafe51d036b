"""Steps in which ranks run actions again while they wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.pipeline.simulation import audit_gaps
from autosplit.runtime.functions import SplitFunctions
from autosplit.trainer import auditing
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.mesh.workers import mesh_of
from tests.pipeline import workers

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
FUSED: dict[str, Any] = {"stage_factory": None, "split_backward": False, "audit": True}


@contextmanager
def fixed_times() -> Iterator[None]:
    """Measured steps in which backwards take 3 and 2 seconds, and forwards 1: plans are the same on
    every machine. Late audits are frequent.
    """

    def times(_: object) -> dict[tuple[int, ActionKind], float]:
        return {
            (stage, kind): 1.0 if kind is FORWARD else 3.0 - stage % 2
            for stage in range(4)
            for kind in ActionKind
        }

    with (
        mock.patch.object(auditing, "median_durations", times),
        mock.patch.object(audit_gaps, "_SHARE", 0.2),
    ):
        yield


@contextmanager
def audited_actions() -> Iterator[list[Action]]:
    """The actions that run again on this rank."""
    actions: list[Action] = []
    original = auditing.ActionAudit.run_again

    def run_again(self: auditing.ActionAudit) -> str:
        actions.append(self.action)
        return original(self)

    with mock.patch.object(auditing.ActionAudit, "run_again", run_again):
        yield actions


def drawing(index: int) -> nn.Module:
    return nn.Sequential(workers.block(index), nn.Dropout(0.2))


def weights(trainer: PipelineTrainer) -> list[Tensor]:
    return [t.clone() for row in trainer.state_dict().values() for t in row.values()]


@ranks(2)
@pytest.mark.parametrize(
    ("options", "period"),
    [
        ({"split_backward": True, "max_grad_norm": 0.1}, 10),
        ({"schedule": "gpipe", "stages": 4, "grad_dtype": torch.float64}, 16),
    ],
)
def test_audits_change_no_bit(options: dict[str, Any], period: int) -> None:
    """Of losses, weights and random numbers. In a period, each action runs again."""
    runs = []
    for audit in (False, True):
        torch.manual_seed(3)
        options = {"stages": 2, **FUSED, **options, "audit": audit}
        with fixed_times(), workers.trainer(drawing, **options) as trainer:
            losses = [trainer.step(workers.data(8, seed=step)) for step in range(3)]
            with audited_actions() as audited:
                losses += [trainer.step(workers.data(8, seed=step)) for step in range(period)]
            runs.append([*losses, *weights(trainer), torch.get_rng_state()])
            if audit:
                assert trainer.auditor is not None
                assert (trainer.auditor.period, trainer.auditor.never) == (period, ())
                assert {*audited} == {*trainer.schedule.ranks[dist.get_rank()]}
    assert all(map(torch.equal, *runs))


@ranks(4)
def test_audits_of_replicas_change_no_bit() -> None:
    """Their buckets of gradients are complete when the last backward reports them."""
    mesh, runs = mesh_of(dp_replicate=2, pp=2), []
    for audit in (False, True):
        torch.manual_seed(3)
        options = {**FUSED, "audit": audit, "mesh": mesh}
        with fixed_times(), workers.trainer(drawing, **options) as trainer:
            data = [workers.data(8, seed=2 * step + dist.get_rank() // 2) for step in range(11)]
            runs.append([*map(trainer.step, data), *weights(trainer)])
    assert all(map(torch.equal, *runs))


def damage(trainer: PipelineTrainer, action: Action) -> Any:
    """Flip a bit of what an action computes, whenever it runs in its place of the row."""
    name = "run" if action.kind is FORWARD else "backward"
    original, activity = getattr(SplitFunctions, name), trainer._groups.activity

    def call(self: SplitFunctions, *args: Any) -> Any:
        results = original(self, *args)
        if activity.action == action and not activity.waiting:
            tensor = results.outputs[0] if name == "run" else results[1][0]
            tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return results

    return mock.patch.object(SplitFunctions, name, call)


@ranks(2)
@pytest.mark.parametrize(
    ("action", "tensor"),
    [(Action(0, FORWARD, 1), "result 0"), (Action(1, BACKWARD, 2), "gradient of module.0.weight")],
)
def test_a_rank_that_computes_wrongly_is_named_on_all_ranks_within_the_period(
    action: Action, tensor: str
) -> None:
    """No optimizer moves in the step of the audit."""
    with fixed_times(), workers.trainer(**FUSED) as trainer:
        assert trainer.auditor is not None
        assert (trainer.auditor.period, trainer.auditor.never) == (None, ())
        for step in range(3):
            trainer.step(workers.data(8, seed=step))
        assert trainer.auditor.period is not None
        assert action not in trainer.auditor.never
        named = (
            rf"rank {action.stage} .*: rank {action.stage}: {action} had other bits when it ran "
            rf"again, in {tensor}.*; the first of three runs was wrong"
        )
        earlier: list[Tensor] = []

        def train(steps: int) -> None:
            for step in range(steps):
                earlier[:] = weights(trainer)
                trainer.step(workers.data(8, seed=step))

        with damage(trainer, action), pytest.raises(PipelineError, match=named):
            train(trainer.auditor.period)
        assert all(map(torch.equal, earlier, weights(trainer)))


@ranks(2)
def test_a_rank_is_marked_on_all_ranks_and_the_step_goes_on() -> None:
    action, options = Action(1, BACKWARD, 2), FUSED | {"audit": "mark"}
    with fixed_times(), workers.trainer(**options) as trainer:
        assert trainer.auditor is not None
        for step in range(3):
            trainer.step(workers.data(8, seed=step))
        start = weights(trainer)
        text = (
            "rank 1: 1B2 had other bits when it ran again, in gradient of module.0.weight; the "
            "first of three runs was wrong"
        )
        with damage(trainer, action), mock.patch.object(auditing.warnings, "warn") as warn:
            for step in range(8):
                trainer.step_async(workers.data(8, seed=step)).wait()
        trainer.record = True
        trainer.step(workers.data(8))
        audits = trainer.timeline().audits
        assert trainer.auditor.spans == [s for s in audits if s.rank == dist.get_rank()]
        warned = [call.args[0] for call in warn.call_args_list]
        assert trainer.auditor.marks == [text]
        assert all(span.start < span.end for span in trainer.auditor.spans)
        assert {span.rank for span in trainer.auditor.spans} == {dist.get_rank()}
        (warning,) = [warning for warning in warned if text in warning]
        assert "The step goes on (audit='mark')" in warning
        assert trainer.metrics()["marks"] == 1
        assert trainer.report().endswith(text)
        assert not any(map(torch.equal, start, weights(trainer)))


@ranks(2)
def test_gradients_that_are_verified_are_not_audited() -> None:
    with fixed_times(), workers.trainer(**FUSED) as trainer:
        for step in range(4):
            trainer.step(workers.data(8, seed=step))
        with mock.patch.object(auditing.ActionAudit, "run_again", return_value="") as run_again:
            assert trainer.verify(workers.data(8)).bits_equal
            assert not run_again.called
            for step in range(4):
                trainer.step(workers.data(8, seed=step))
        assert run_again.called or dist.get_rank()


def test_steps_without_the_option_have_none() -> None:
    with workers.trainer(ranks=1, stage_factory=None) as trainer:
        with mock.patch.object(Executor, "set_audits") as set_audits:
            for step in range(5):
                trainer.step(workers.data(8, seed=step))
        assert trainer.auditor is None
        assert not set_audits.called
        assert not trainer._runner.spans


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"audit": "warn"}, "audit must be True, False or 'mark'; got 'warn'"),
        ({"memory_limit": "1GiB"}, "audit=True keeps tensors that moves and memory_limit do not"),
        ({"accumulation": "auto"}, "which needs accumulation='exact'; got 'auto'"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        workers.trainer(**{"ranks": 1, "audit": True, "stage_factory": None, **options})
