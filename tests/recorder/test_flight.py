"""Alarms: one on any rank has all ranks write the same step, once."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from autosplit.cli import main
from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer, Recorder
from autosplit.recorder import bundle
from autosplit.recorder.tape import StepTape
from tests.kept_ranks import ranks
from tests.pipeline import workers

pytestmark = pytest.mark.filterwarnings("ignore:the flight recorder wrote")


def folder() -> Path:
    """A folder of all ranks."""
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, 0)
    return Path(names[0])


def bundles(home: Path) -> list[str]:
    """The bundles after all ranks have written."""
    dist.barrier()
    steps = sorted(path.name.partition("-step-")[2] for path in home.iterdir())
    dist.barrier()
    return steps


def trainer(home: Path, **options: Any) -> PipelineTrainer:
    mesh = options.pop("mesh", None)
    more = {} if mesh is None else {"mesh": mesh}
    return workers.trainer(
        stage_factory=None, recorder=Recorder(home, **options), nonfinite="skip", **more
    )


@ranks(2)
def test_an_alarm_of_one_rank_is_written_by_all_once() -> None:
    home = folder()

    def loud(metrics: Any) -> bool:
        return dist.get_rank() == 1

    with trainer(home, alarms=[loud], log=home / "log") as stages:
        for _ in range(3):
            stages.step(workers.data(8))
    assert bundles(home) == ["", "1"]
    (path,) = [path for path in home.iterdir() if "-step-" in path.name]
    assert sorted(part.name for part in path.iterdir()) == ["rank-0", "rank-1"]
    facts = json.loads((path / f"rank-{dist.get_rank()}" / "record.json").read_text())
    assert facts["alarm"] == "metrics"
    assert [step["step"] for step in facts["steps"]] == [1]
    lines = (home / "log" / f"rank-{dist.get_rank()}.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert "loss" in json.loads(lines[0])["metrics"]


@ranks(2)
def test_an_alarm_that_comes_in_each_step_hides_no_other() -> None:
    home, (inputs, targets) = folder(), workers.data(8)
    with trainer(home, alarms=["nonfinite", lambda metrics: True]) as stages:
        for _ in range(2):
            stages.step(inputs, target=targets)
        inputs[3, 1] = torch.nan
        for _ in range(2):
            stages.step(inputs, target=targets)
    assert bundles(home) == ["1", "3"]


@ranks(2)
def test_a_step_without_alarms_writes_nothing() -> None:
    home, compute = folder(), StepTape.compute_digests
    with (
        mock.patch.object(StepTape, "compute_digests", autospec=True, side_effect=compute) as calls,
        trainer(home) as stages,
    ):
        for seed in range(3):
            stages.step(workers.data(8, seed=seed))
            stages.step_async(workers.data(8, seed=seed)).wait()
    assert bundles(home) == []
    waits = 0 if dist.get_rank() else 3  # for the first gradient and those after the last F
    assert calls.call_count == 6 * (waits + 1)  # and at the end


@ranks(2)
def test_a_function_that_raises_on_one_rank_is_a_warning() -> None:
    home = folder()

    def loud(metrics: Any) -> bool:
        return dist.get_rank() == 0 or 1 / 0 > 0

    with trainer(home, alarms=[loud]) as stages, warnings.catch_warnings(record=True) as texts:
        stages.step(workers.data(8))
    assert bundles(home) == ["1"]
    raised = [str(text.message) for text in texts if "cannot" in str(text.message)]
    expected = "the flight recorder cannot call loud(metrics): ZeroDivisionError: division by zero"
    assert raised == [expected] * dist.get_rank()


@ranks(2)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_gradients_have_digests_in_steps_that_are_written_only(max_grad_norm: float | None) -> None:
    home = folder()

    def second(metrics: Any) -> bool:
        return len(stages._runner.flight._ring) == 2  # type: ignore[union-attr]

    recorder = Recorder(home, alarms=[second])
    options: dict[str, Any] = {"recorder": recorder, "max_grad_norm": max_grad_norm}
    with workers.trainer(stage_factory=None, **options) as stages:
        for _ in range(3):
            stages.step(workers.data(8))
    assert bundles(home) == ["2"]
    (path,) = home.iterdir()
    facts = json.loads((path / f"rank-{dist.get_rank()}" / "record.json").read_text())
    assert [len(step["gradients"]) for step in facts["steps"]] == [0, 1]


@ranks(2)
def test_a_signal_to_one_rank_writes_the_next_step() -> None:
    home, handler = folder(), signal.getsignal(signal.SIGUSR1)
    with trainer(home) as stages:
        stages.step(workers.data(8))
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        stages.step(workers.data(8))
        stages.step(workers.data(8))
    assert bundles(home) == ["2"]
    assert signal.getsignal(signal.SIGUSR1) is handler


@ranks(2)
def test_an_error_on_one_rank_writes_the_step_of_all() -> None:
    home = folder()
    with trainer(home) as stages:
        stages.step(workers.data(8))
        if dist.get_rank() == 1:
            stages.modules[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(PipelineError):
            stages.step(workers.data(8))
    assert bundles(home) == ["2"]


@ranks(2)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_gradient_that_the_trainer_drops_is_an_alarm(max_grad_norm: float | None) -> None:
    """Whether the recorder looks at its numbers, or takes what the trainer has found."""
    home = folder()
    with workers.trainer(
        stage_factory=None,
        recorder=Recorder(home),
        nonfinite="skip",
        max_grad_norm=max_grad_norm,
    ) as stages:
        if dist.get_rank() == 1:
            weight = next(stages.modules[1].parameters())
            weight.register_hook(lambda gradient: gradient * torch.nan)
        stages.step(workers.data(8))
    assert bundles(home) == ["1"]
    (path,) = home.iterdir()
    text = written_text(path, 1)
    assert text.startswith("the gradient of ")
    assert text.endswith("weight in stage 1 is not finite")


def written_text(path: Path, rank: int) -> str:
    """The alarm that a rank wrote into a bundle."""
    facts: dict[str, Any] = json.loads((path / f"rank-{rank}" / "record.json").read_text())
    text: str = facts["text"]
    return text


def step_with_a_flipped_bit(stages: PipelineTrainer) -> None:
    """Two steps; between them, a bit of a parameter of rank 1's copy flips."""
    stages.step(workers.data(8))
    if dist.get_rank() == 1:
        weight = next(stages.modules[1].parameters())
        weight.detach().view(-1).view(torch.int32)[3] ^= 1
    stages.step(workers.data(8))


@ranks(2)
def test_parameters_of_replicas_that_differ_are_an_alarm() -> None:
    home = folder()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    with trainer(home, mesh=mesh) as stages:
        step_with_a_flipped_bit(stages)
    assert bundles(home) == ["2"]
    (path,) = home.iterdir()
    text = written_text(path, 0)
    assert text == "parameters or gradients of replicas differ between the ranks [0, 1]"
    lines = CliRunner().invoke(main, ["replay", str(path)]).output.splitlines()
    assert lines[1] == "0.weight of stage 1 differs between the ranks [0] and [1]"


@ranks(2)
def test_a_replay_finds_the_fault_of_any_replica() -> None:
    home = folder()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    with trainer(home, mesh=mesh) as stages:
        inputs, targets = workers.data(8)
        if dist.get_rank() == 1:
            inputs[5, 2] = torch.nan
        stages.step(inputs, target=targets)
    assert bundles(home) == ["1"]
    (path,) = home.iterdir()
    result = CliRunner().invoke(main, ["replay", str(path)])
    assert "0F2 on rank 1: NaN in aten.linear.default" in result.output
    assert result.exit_code == 1
    result = CliRunner().invoke(main, ["replay", str(path), "--pipeline", "0"])
    assert "24 actions have no fault" in result.output
    result = CliRunner().invoke(main, ["replay", str(path), "--pipeline", "2"])
    assert "no part of pipeline 2: expected --pipeline [0, 1]" in result.output


@ranks(2)
def test_parameters_that_differ_along_tp_are_an_alarm_and_a_replay_is_refused_at_once() -> None:
    home = folder()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "pp"))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}

    def build(index: int) -> nn.Module:
        torch.manual_seed(index)
        up, down = nn.Linear(workers.WIDTH, 8), nn.Linear(8, workers.WIDTH)
        layers = nn.Sequential(workers.block(index), up, nn.Tanh(), down)
        return parallelize_module(layers, mesh["tp"], plan)

    recorder = Recorder(home)
    with pytest.warns(UserWarning, match="a replay cannot run them again"):
        stages = workers.trainer(
            build, stage_factory=None, recorder=recorder, nonfinite="skip", mesh=mesh
        )
    with stages:
        step_with_a_flipped_bit(stages)
    assert bundles(home) == ["2"]
    (path,) = home.iterdir()
    text = written_text(path, 0)
    assert text == "parameters or gradients of ranks along 'tp' differ between the ranks [0, 1]"


@ranks(2)
def test_shared_parameters_that_differ_are_an_alarm() -> None:
    home = folder()
    with workers.trainer(
        workers.Tied,
        stage_factory=None,
        recorder=Recorder(home),
        shared_parameters=[[(0, "tied"), (1, "tied")]],
    ) as stages:
        stages.step(workers.data(8))
        if dist.get_rank() == 1:
            stages.modules[1].tied.detach().view(torch.int32)[0, 0] ^= 1
        stages.step(workers.data(8))
    assert bundles(home) == ["2"]


@ranks(2)
def test_a_full_disk_ends_nothing_and_leaves_nothing() -> None:
    home = folder()
    full = OSError(errno.ENOSPC, "No space left on device")
    with trainer(home, alarms=[lambda metrics: True]) as stages:
        with (
            mock.patch.object(bundle.torch, "save", side_effect=full),
            pytest.warns(UserWarning, match="No space left on device"),
        ):
            stages.step(workers.data(8))
        losses = stages.step(workers.data(8))
    assert losses.isfinite().all()
    assert bundles(home) == []


def test_a_part_is_whole_if_another_rank_renames_the_folder_first(tmp_path: Path) -> None:
    sync = bundle.sync_folder

    def rename_and_sync(path: Path) -> None:
        if path.suffix == ".part":
            path.rename(path.with_suffix(""))
        sync(path)

    with mock.patch.object(bundle, "sync_folder", rename_and_sync):
        bundle.write_part(tmp_path / "step", 0, 1, {"rank": 0}, {}, {})
    assert [*bundle.read_parts(tmp_path / "step")] == [0]


@ranks(2)
def test_without_a_recorder_nothing_is_watched() -> None:
    with workers.trainer(stage_factory=None) as stages:
        stages.step(workers.data(8))
        calls = stages._runner.memory.step.executor._row  # type: ignore[union-attr]
        assert "noted_fetch" not in str([bound.fetch for bound in calls])
    with trainer(folder()) as stages:
        stages.step(workers.data(8))
        calls = stages._runner.memory.step.executor._row  # type: ignore[union-attr]
        assert "noted_fetch" in str([bound.fetch for bound in calls])


def test_wrong_options_name_the_known_ones() -> None:
    with pytest.raises(PipelineError, match="unknown alarm 'nan'; expected a function of"):
        Recorder(alarms=["nan"])
    with pytest.raises(PipelineError, match="expected keep such as"):
        Recorder(keep="much")
    with pytest.raises(PipelineError, match="must be 'boundaries' or 'all'; got 'most'"):
        Recorder(digests="most")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="steps must be at least 1; got 0"):
        Recorder(steps=0)
