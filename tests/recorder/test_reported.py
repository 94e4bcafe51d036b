"""What the recorder, its replay and anomaly mode say where people report that torch says little:
see "Wrong numbers" in docs/reported.md.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autosplit.errors import AnomalyError, PipelineError
from autosplit.pipeline import PipelineTrainer, Recorder, RunOptions, StageOptions
from autosplit.recorder.bundle import read_parts
from tests.kept_ranks import ranks
from tests.recorder.test_audit import damage
from tests.recorder.test_replay import replay

pytestmark = pytest.mark.filterwarnings(
    "ignore:the flight recorder wrote", "ignore:Anomaly Detection", "ignore:Error detected"
)
WIDTH = 4


class LateInfinity(nn.Module):
    """A layer, and then a function with an infinite derivative. The layer's backward makes the
    first NaN, of the infinity.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return torch.sqrt(y - y.detach())


def run_step(folder: pathlib.Path, stages: Any, **options: Any) -> PipelineError:
    """The error of a step under anomaly mode."""
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(PipelineError) as raised,
        PipelineTrainer(
            stages,
            F.mse_loss,
            torch.optim.SGD,
            stages=2,
            microbatches=2,
            run_options=RunOptions(recorder=Recorder(folder)),
            **options,
        ) as trainer,
    ):
        trainer.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
    return raised.value


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_torchtitan_1544_anomaly_mode_with_dtensors(tmp_path: pathlib.Path) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def build(index: int) -> nn.Module:
        last = parallelize_module(LateInfinity(), mesh["tp"], plan)
        return last if index else nn.Linear(WIDTH, WIDTH)

    error = run_step(tmp_path, build, mesh=mesh)
    assert isinstance(error.__cause__, AnomalyError)
    assert "makes the first, for " in str(error)
    assert "y = self.down(F.gelu(self.up(x)))" in str(error)


@ranks(2)
def test_torchtitan_3863_a_loss_that_is_not_finite() -> None:
    """All ranks raise in the step, and the bundle holds the batch."""
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, 0)
    folder = pathlib.Path(names[0])
    inputs, targets = torch.ones(8, WIDTH), torch.ones(8, WIDTH)
    targets[5] = 0.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - torch.log(target)).square().mean()

    options = RunOptions(recorder=Recorder(folder))
    with (
        pytest.raises(PipelineError, match="the loss is inf for microbatch 2"),
        PipelineTrainer(
            lambda index: nn.Linear(WIDTH, WIDTH),
            loss,
            torch.optim.SGD,
            stages=2,
            microbatches=4,
            run_options=options,
        ) as trainer,
    ):
        trainer.step(inputs, target=targets)
    dist.barrier()
    output = replay(folder).output
    assert "1F2 on rank 1: infinity in aten.log.default" in output
    assert "return (output - torch.log(target)).square().mean()" in output
    assert "samples   5 of the batch, in microbatch 2" in output
    (bundle,) = folder.iterdir()
    kept = read_parts(bundle)[1].tensors["kept"]["1F2"]
    assert torch.equal(kept[1], targets[4:6])


def test_torchtitan_4333_corruption_in_a_later_group_of_accumulated_gradients(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cause is named from one step's bundle, and ``verify`` compares a step that repeats it."""
    groups = 0

    def second(metrics: Any) -> bool:
        nonlocal groups
        groups += 1
        return groups == 2

    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with PipelineTrainer(
        lambda index: nn.Linear(WIDTH, WIDTH),
        F.mse_loss,
        torch.optim.SGD,
        stages=2,
        microbatches=4,
        ranks=1,
        run_options=RunOptions(recorder=Recorder(tmp_path, alarms=[second])),
    ) as trainer:
        trainer.forward_backward(batch)
        with monkeypatch.context() as patch:
            damage(patch, "I", {1}, lambda results: results[0][0])
            trainer.forward_backward(batch)
        assert trainer.verify(batch).bits_equal
        with monkeypatch.context() as patch:
            damage(patch, "I", {1}, lambda results: results[0][0])
            wrong = trainer.verify(batch)
    assert str(wrong).startswith("gradients differ from plain autograd: ")
    assert {stage for _, stage, _ in wrong.differences} == {0}
    output = replay(tmp_path).output
    assert "1I0 on rank 0: result 0, f32[2, 4]" in output
    assert "has other bits than in the run" in output


def test_pytorch_160016_the_line_with_the_infinity(tmp_path: pathlib.Path) -> None:
    """Anomaly mode names the line of the first NaN; the replay that of the infinity before it."""
    error = run_step(tmp_path, [nn.Linear(WIDTH, WIDTH), LateInfinity()], ranks=1)
    assert "y = self.down(F.gelu(self.up(x)))" in str(error)
    named, _, line, *_ = replay(tmp_path).output.partition("\n")[2].split("\n")
    assert named.startswith("1I0 on rank 0: infinity in aten.div")
    assert "return torch.sqrt(y - y.detach())" in line


def test_pytorch_100854_anomaly_mode_with_compiled_stages(tmp_path: pathlib.Path) -> None:
    stages = [nn.Linear(WIDTH, WIDTH), LateInfinity()]
    options = StageOptions(backend="inductor")
    error = run_step(tmp_path, stages, ranks=1, stage_options=options)
    assert isinstance(error.__cause__, AnomalyError)
    assert "y = self.down(F.gelu(self.up(x)))" in str(error)
    assert "return torch.sqrt(y - y.detach())" in replay(tmp_path).output


def test_pytorch_100854_anomaly_mode_under_torch_compile() -> None:
    first = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(first, LateInfinity())
    compiled = torch.compile(model, backend="autosplit")
    with torch.autograd.detect_anomaly():
        compiled(torch.ones(4, WIDTH)).sum().backward()
        with pytest.raises(AnomalyError, match=r"for .*self\.down"):
            first.weight.grad.sum()  # type: ignore[union-attr]  # runs W
