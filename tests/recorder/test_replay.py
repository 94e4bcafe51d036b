"""A step that goes wrong is written, and its replay names what went wrong first."""

from __future__ import annotations

import base64
import io
import json
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from click.testing import CliRunner, Result
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from autosplit.cli import main
from autosplit.errors import AutosplitError, PipelineError
from autosplit.pipeline import PipelineTrainer, Recorder, RunOptions, Schedule, StageOptions
from autosplit.pipeline.schedule.schedule import Action
from autosplit.recorder.bundle import read_parts
from autosplit.recorder.faults import FaultSearch
from autosplit.recorder.program import Program
from autosplit.recorder.replay import StepReplay
from autosplit.stage import Stage
from tests.kept_ranks import ranks
from tests.mesh.workers import common_folder

pytestmark = pytest.mark.filterwarnings("ignore:the flight recorder wrote")
ROWS, WIDTH = 8, 6


class Block(nn.Module):
    """A stage with random numbers, a buffer that its forward writes, and a logarithm."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.tanh(self.fc(x)))
        return self.norm(torch.log(y + 3))


def alarm(metrics: Any) -> bool:
    return True


def trainer(
    folder: pathlib.Path,
    *,
    block: type[nn.Module] = Block,
    loss: Any = F.mse_loss,
    schedule: str | Schedule = "1f1b",
    count: int = 3,
    stage_options: StageOptions | None = None,
    **options: Any,
) -> PipelineTrainer:
    recorder = Recorder(folder=folder, **options)
    return PipelineTrainer(
        block,
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule=schedule,
        stages=count,
        microbatches=4,
        ranks=1,
        stage_options=stage_options,
        run_options=RunOptions(recorder=recorder),
    )


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def flip(tensor: Tensor) -> None:
    """Flip one bit of a tensor, which autograd does not see."""
    tensor.detach().view(-1).view(torch.int32).data[1] ^= 1 << 12


def replay(folder: pathlib.Path, *options: Any) -> Result:
    (bundle,) = [path for path in folder.iterdir() if "-step-" in path.name]
    result = CliRunner().invoke(main, ["replay", str(bundle), *map(str, options)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a recorder that wrote one step, in which nothing went wrong."""
    folder = tmp_path_factory.mktemp("recorded")
    with trainer(folder, alarms=[alarm]) as stages:
        stages.step(*data())
    return folder


@pytest.fixture
def flights(recorded: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of that folder, which a test may change."""
    return pathlib.Path(shutil.copytree(recorded, tmp_path / "flights"))


@pytest.mark.parametrize("keep", ["1GiB", 1])
def test_a_replay_has_the_bits_of_the_run(tmp_path: pathlib.Path, keep: Any) -> None:
    """Dropout, batch norm, sums of gradients; with boundary tensors that were kept or not."""
    with trainer(tmp_path, alarms=[alarm], keep=keep) as stages:
        stages.step(*data())
        stages.step(*data(1))  # each alarm writes one step
    result = replay(tmp_path)
    assert result.exit_code == 0, result.output
    assert "step 1, metrics: alarm(metrics) is true" in result.output
    assert "36 actions have no fault" in result.output


def test_the_first_operator_and_the_sample_of_a_nan_are_named(tmp_path: pathlib.Path) -> None:
    inputs, targets = data()
    with trainer(tmp_path) as stages:
        stages.step(inputs, targets)
        inputs[5, 2] = float("nan")
        with pytest.raises(PipelineError, match="not finite"):
            stages.step(inputs, targets)
    files = "--picture", tmp_path / "step.svg", "--json", tmp_path / "fault.json"
    result = replay(tmp_path, *files)
    assert result.exit_code == 1
    lines = [line.split() for line in result.output.splitlines()]
    assert result.output.startswith("step 2, nonfinite: PipelineError")
    assert lines[1] == ["0F2", "on", "rank", "0:", "NaN", "in", "aten.linear.default"]
    assert lines[2] == ["module", "fc"]
    assert "test_replay.py" in lines[3][1]
    assert lines[4] == ["samples", "5", "of", "the", "batch,", "in", "microbatch", "2"]
    assert "#ff0000" in (tmp_path / "step.svg").read_text()
    assert json.loads((tmp_path / "fault.json").read_text())["fault"]["action"] == "0F2"


def normalized(index: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def test_an_operator_of_several_results_is_named(tmp_path: pathlib.Path) -> None:
    inputs, targets = data()
    inputs[5, 2] = float("inf")
    with (
        trainer(tmp_path, block=normalized) as stages,  # type: ignore[arg-type]
        pytest.raises(PipelineError, match="not finite"),
    ):
        stages.step(inputs, targets)
    output = replay(tmp_path).output
    assert "0F2 on rank 0: NaN in aten.native_layer_norm.default\n  module    0\n" in output
    assert "samples   5 of the batch, in microbatch 2" in output


def linear(index: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_parameter_that_was_not_finite_is_named_and_no_sample(
    value: float, tmp_path: pathlib.Path
) -> None:
    """Infinity becomes NaN in a later operator."""
    inputs, targets = torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    with trainer(tmp_path, block=linear) as stages:
        stages.modules[0][0].weight.data[4:, 3] = value
        with torch.no_grad():
            stages.modules[0][2].weight[:, 4:] = torch.tensor([1.0, -1.0])
        with pytest.raises(PipelineError, match="not finite"):
            stages.step(inputs, targets)
    lines = replay(tmp_path).output.splitlines()
    assert lines[1] == "0F0 on rank 0: parameter 0.weight was not finite when the step began"
    assert lines[2] == "  where     first at [4, 3]"
    assert "2 of 36 numbers not finite" in lines[3]
    assert "load a checkpoint in which it is finite" in lines[4]
    assert "samples" not in "".join(lines)


def test_a_buffer_that_was_not_finite_is_named_with_the_action_before_which(
    tmp_path: pathlib.Path,
) -> None:
    """Microbatch 1 reads what microbatch 0 wrote."""
    with trainer(tmp_path, block=Moving) as stages, pytest.raises(PipelineError):
        stages.step(*data())
    assert "0F1 on rank 0: buffer mean was not finite when 0F1 began" in replay(tmp_path).output


class Moving(nn.Module):
    """A stage whose buffer becomes NaN in its first forward, after it was read."""

    mean: Tensor

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) + self.mean
        self.mean.copy_(torch.log(-y.detach().square().mean(0)))
        return y


def test_an_overflow_from_large_weights_blames_no_sample(tmp_path: pathlib.Path) -> None:
    inputs, targets = torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    with trainer(tmp_path, block=linear) as stages:
        stages.modules[0][0].weight.data[:, :3] = 3e38
        with pytest.raises(PipelineError, match="not finite"):
            stages.step(inputs, targets)
    output = replay(tmp_path).output
    assert "0F0 on rank 0: infinity in aten.linear" in output
    assert "samples" not in output


class Magnitude(nn.Module):
    """A stage whose gradient is NaN at 0, where its output is finite."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.fc(x).square())


def test_the_sample_of_a_gradient_is_named(tmp_path: pathlib.Path) -> None:
    """By tensors that the forward saved and the gradients of outputs."""
    inputs, targets = data()
    inputs[5] = 0
    with trainer(tmp_path, block=Magnitude) as stages, pytest.raises(PipelineError):
        stages.step(inputs, targets)
    output = replay(tmp_path).output
    assert "2I2 on rank 0: infinity in aten.div" in output
    assert "samples   5 of the batch, in microbatch 2" in output


class FrozenFirst(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(index > 0)


def test_a_frozen_first_stage_has_no_backward(tmp_path: pathlib.Path) -> None:
    with trainer(tmp_path, block=FrozenFirst, alarms=[alarm]) as stages:
        stages.step(*data())
    assert "36 actions have no fault" in replay(tmp_path).output
    result = replay(tmp_path, "--action", "0I0", "--python", tmp_path / "repro.py")
    assert "0I0 computes nothing: no gradient of its stage is needed" in result.output


def test_a_replay_has_the_threads_of_the_run(tmp_path: pathlib.Path) -> None:
    """Kernels add in another order with another number of threads."""
    threads, seen = torch.get_num_threads(), set[int]()
    with trainer(tmp_path, alarms=[alarm]) as stages:
        stages.step(*data())
    original = Program.run

    def run(self: Program, arguments: Any) -> Any:
        seen.add(torch.get_num_threads())
        return original(self, arguments)

    try:
        torch.set_num_threads(threads + 1)
        with mock.patch.object(Program, "run", run):
            replay(tmp_path)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert seen == {threads}


def test_a_replay_drops_the_results_of_earlier_microbatches(recorded: pathlib.Path) -> None:
    results: list[weakref.ref[Tensor]] = []
    original = Program.run

    def run(self: Program, arguments: Any) -> Any:
        values = original(self, arguments)
        results.extend(weakref.ref(value) for value in values if isinstance(value, Tensor))
        return values

    (bundle,) = recorded.iterdir()
    step = StepReplay(read_parts(bundle))
    with mock.patch.object(Program, "run", run):
        for _, text in FaultSearch(step).findings(step.actions()):
            assert not text
    assert sum(ref() is not None for ref in results) < len(results) / 2  # of four microbatches


class Overflow(nn.Module):
    """Attends under a mask of infinities, and then takes infinity from infinity."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.fc, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((WIDTH,), -float("inf")).index_fill(0, torch.tensor([0, 1]), 0.0)
        y = torch.softmax(self.fc(x) + mask, -1)
        z = torch.exp(y * self.factor)
        return z - z.detach() + y


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_infinities_that_become_nan_are_named_and_masks_are_not(
    factor: float, tmp_path: pathlib.Path
) -> None:
    with PipelineTrainer(
        [Overflow(factor)],
        F.mse_loss,
        torch.optim.SGD,
        microbatches=4,
        ranks=1,
        run_options=RunOptions(recorder=Recorder(tmp_path), nonfinite="skip"),
    ) as stages:
        stages.step(*data())
    if factor == 1.0:
        assert not [*tmp_path.iterdir()]
        return
    output = replay(tmp_path).output
    assert "0F0 on rank 0: infinity in aten.exp" in output
    assert "z = torch.exp(y * self.factor)" in output


def test_a_target_that_the_loss_refuses_is_named(tmp_path: pathlib.Path) -> None:
    inputs, targets = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % WIDTH
    with trainer(tmp_path, loss=F.cross_entropy) as stages:
        stages.step(inputs, targets)
        targets[3] = WIDTH
        with pytest.raises(AutosplitError):
            stages.step(inputs, targets)
    output = replay(tmp_path).output
    assert "2F1 on rank 0: IndexError" in output
    assert "samples   3 of the batch, in microbatch 1" in output
    columns = [len(start) for start in re.findall(r"^  (\S+ +)[fi]\d\d\[", output, re.MULTILINE)]
    assert len(columns) > 1
    assert len({*columns}) == 1


OPERATOR = """
import torch
from torch import Tensor

@torch.library.custom_op("replayed_operators::linear", mutates_args=())
def custom_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)
"""


def test_operators_of_the_user_are_imported(
    flights: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = flights.rglob("stage-0/capture-0/forward.py")
    source = path.read_text().replace("aten.linear.", "torch.ops.replayed_operators.linear.")
    path.write_text(source)
    result = replay(flights)
    assert result.exit_code == 2
    assert "operator replayed_operators::linear is not registered here" in result.output
    (tmp_path / "replayed_operators.py").write_text(OPERATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = replay(flights, "--import", "replayed_operators")
    assert "36 actions have no fault" in result.output
    result = replay(flights, "--import", "replayed_elsewhere")
    assert "No module named 'replayed_elsewhere'" in result.output


def damaged(call: str, at: int, damage: Any) -> Any:
    """A call of all stages after which, the ``at``-th time, something is damaged."""
    original, calls = getattr(Stage, call), []

    def run(self: Stage, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        calls.append(call)
        if len(calls) == at:
            damage(self, result)
        return result

    return mock.patch.object(Stage, call, run)


FLIPS = {
    "output": ("forward", 2, lambda _, outputs: flip(outputs[0]), "result 0, f32[2, 6]"),
    "gradient": ("backward_input", 2, lambda _, grads: flip(grads[0]), "result 0, f32[2, 6]"),
    "parameter": (
        "backward_weight",
        1,
        lambda stage, _: flip(next(stage.module.parameters())),
        "fc.weight has other bits than when the step began",
    ),
    "weight gradient": (
        "backward_weight",
        2,
        lambda stage, _: flip(next(iter(stage.gradients.values()))),
        "summed over microbatches, has other bits",
    ),
}


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_found(name: str, tmp_path: pathlib.Path) -> None:
    call, at, damage, text = FLIPS[name]
    with trainer(tmp_path, alarms=[alarm]) as stages, damaged(call, at, damage):
        stages.step(*data())
    result = replay(tmp_path)
    assert result.exit_code == 1
    assert text in result.output


@pytest.mark.parametrize("accumulation", ["fused", "joined"])
def test_results_are_compared_however_gradients_are_added(
    accumulation: str, tmp_path: pathlib.Path
) -> None:
    options = StageOptions(accumulation=accumulation)
    with (
        damaged("forward", 1, FLIPS["output"][2]),
        trainer(tmp_path, count=2, stage_options=options, alarms=[alarm]) as stages,
    ):
        stages.step(*data())
    expected = r"0F0 on rank 0: result 0, .* has other bits than in the run"
    assert re.search(expected, replay(tmp_path).output)


HELD = {  # the call after which the bit flips, and the action that takes the tensor
    "saved": ("forward", "1I0"),
    "deferred": ("backward_input", "0W0"),
}


@pytest.mark.parametrize("name", HELD)
def test_a_bit_that_flips_in_a_held_tensor_is_an_alarm_and_named(
    name: str, tmp_path: pathlib.Path
) -> None:
    """After the last F or I of the second step, in a tensor of the first microbatch."""
    call, takes = HELD[name]
    names = []

    def damage(stage: Stage, _: Any) -> None:
        (residuals,) = stage.residuals_of(0)
        names[:] = [n for n, t in residuals.named_tensors.items() if t.shape == (2, WIDTH)]
        flip(residuals.named_tensors[names[-1]])

    options: dict[str, Any] = {"schedule": "gpipe", "digests": "all"}
    with trainer(tmp_path, count=2, **options) as stages, damaged(call, 16, damage):
        stages.step(*data())
        assert not [*tmp_path.iterdir()]
        with pytest.warns(UserWarning, match=f"memory: held .* has other bits before {takes}"):
            stages.step(*data())
    result = replay(tmp_path)
    expected = f"{takes} on rank 0: held {names[-1]} has other bits before {takes} than"
    assert expected in result.output


def test_a_bit_that_flips_on_its_way_is_found(flights: pathlib.Path) -> None:
    """The message between two stages of this rank, after it was sent."""
    (bundle,) = flights.iterdir()
    path = bundle / "rank-0" / "record.json"
    facts = json.loads(path.read_text())
    facts["steps"][-1]["actions"]["1F2"]["took"][0][2] = "other"
    path.write_text(json.dumps(facts))
    assert "1F2 on rank 0: argument 0 has other bits than its sender" in replay(flights).output


def test_actions_between_two_and_a_bound(recorded: pathlib.Path) -> None:
    lines = replay(recorded, "--from", "1F1", "--to", "1I1").output.splitlines()
    assert lines[1:] == [
        *(f"{action}: as recorded" for action in ("1F1", "2F1", "2I1", "1I1")),
        "4 actions have no fault",
    ]
    result = replay(recorded, "--action", "1W2")  # a part of a sum
    assert "1 actions have no fault" in result.output
    for option in ("--from", "--to", "--action"):
        assert "9F9 is not in the step" in replay(recorded, option, "9F9").output
    result = replay(recorded, "--action", "1F1", "--bound", "0.1")
    assert "1F1 on rank 0: a magnitude above 0.1 in aten" in result.output
    assert result.exit_code == 1


def test_one_file_reproduces_an_action(
    recorded: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "action.py"
    replay(recorded, "--action", "1F1", "--python", file)
    command = [sys.executable, file]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("0 tensor([")
    replay(recorded, "--action", "1F1", "--python", file, "--no-tensors")
    runpy.run_path(str(file), run_name="__main__")
    output = capsys.readouterr().out
    assert output.startswith("0 tensor([")
    assert "0., 0., 0." in output


class Scaled(nn.Module):
    """A stage with a tensor that is neither a parameter nor a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(WIDTH, WIDTH), torch.full((WIDTH,), 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


@pytest.mark.parametrize("value", [1.5, 0.0])
def test_a_file_without_tensors_has_no_constants(value: float, tmp_path: pathlib.Path) -> None:
    with trainer(tmp_path, block=Scaled, alarms=[alarm]) as stages:
        stages.step(*data())
    file = tmp_path / "action.py"
    replay(tmp_path, "--action", "1F1", "--python", file, *["--no-tensors"] * (value == 0.0))
    saved = base64.b64decode(runpy.run_path(str(file))["SAVED"])
    _, constants, _ = torch.load(io.BytesIO(saved))
    assert [*map(torch.unique, constants.values())] == [torch.tensor([value])]


def test_a_bundle_without_tensors_holds_digests_only(tmp_path: pathlib.Path) -> None:
    with trainer(tmp_path, alarms=[alarm], tensors=False) as stages:
        stages.step(*data())
    files = {path.name for path in tmp_path.rglob("*.*") if path.is_file()}
    assert files == {"record.json"}
    result = replay(tmp_path)
    assert result.exit_code == 2
    assert "all recorded results are finite" in result.output
    assert "stage 0 cannot be run again: the bundle has no tensors of it" in result.output


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_microbatches_of_different_sizes_have_the_bits_of_the_run(
    schedule: str, tmp_path: pathlib.Path
) -> None:
    """Batch norm and sums of gradients follow the order of the run, which "auto" changes."""
    with trainer(tmp_path, alarms=[alarm], schedule=schedule) as stages:
        stages.step(
            microbatches=[(torch.randn(n, WIDTH), torch.randn(n, WIDTH)) for n in (2, 9, 4, 17, 3)]
        )
    (record,) = tmp_path.rglob("record.json")
    actions = json.loads(record.read_text())["steps"][-1]["actions"]
    order = [name for name in actions if name.startswith("0F")]
    assert (order == sorted(order)) == (schedule == "1f1b")
    assert "45 actions have no fault" in replay(tmp_path).output


class Texts(nn.Module):
    """A stage whose graph for texts of one token is not that of longer texts."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])[:, None] / x.shape[1]
        return self.fc(x) + place


@pytest.mark.parametrize("fault", ["NaN", "target"])
def test_a_fault_in_a_microbatch_of_its_own_length_is_named(
    fault: str, tmp_path: pathlib.Path
) -> None:
    lengths = [3, 1, 5, 2]
    inputs = [torch.randn(2, length, WIDTH) for length in lengths]
    targets = [torch.zeros(2, length, dtype=torch.int64) for length in lengths]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    with trainer(tmp_path, block=Texts, loss=loss) as stages:
        stages.step(microbatches=[*zip(inputs, targets, strict=True)])
        if fault == "NaN":
            inputs[2][1, 4, 0] = float("nan")
        else:
            targets[2][1, 4] = WIDTH
        with pytest.raises(AutosplitError):
            stages.step(microbatches=[*zip(inputs, targets, strict=True)])
    output = replay(tmp_path).output
    if fault == "NaN":
        assert "0F2 on rank 0: NaN in aten.reshape.default\n  module    fc\n" in output
        assert "return self.fc(x) + place" in output
    else:
        assert "2F2 on rank 0: IndexError" in output
    assert "samples   5 of the batch, in microbatch 2" in output


def test_samples_are_counted_in_their_microbatch_while_earlier_sizes_are_unknown(
    tmp_path: pathlib.Path,
) -> None:
    """ "auto" runs microbatch 4 before others of the list."""
    targets = [torch.zeros(n, dtype=torch.int64) for n in (2, 9, 4, 17, 3)]
    targets[4][1] = WIDTH
    microbatches = [(torch.randn(len(target), WIDTH), target) for target in targets]
    with (
        trainer(tmp_path, loss=F.cross_entropy, schedule="auto") as stages,
        pytest.raises(AutosplitError),
    ):
        stages.step(microbatches=microbatches)
    output = replay(tmp_path).output
    assert "2F4 on rank 0: IndexError" in output
    assert "samples   1 of microbatch 4" in output


def test_weights_in_an_order_of_their_own_have_no_false_fault(tmp_path: pathlib.Path) -> None:
    """A sum in another order has other bits."""
    names = [*(f"0F{m}" for m in range(4)), *(f"0I{m}" for m in range(4))]
    row = tuple(map(Action.parse, [*names, "0W2", "0W0", "0W3", "0W1"]))
    schedule = Schedule("own", 1, 4, (row,), (0,), split_backward=True)
    with trainer(tmp_path, alarms=[alarm], schedule=schedule, count=1) as stages:
        stages.step(*data())
    assert "12 actions have no fault" in replay(tmp_path).output


class InParts(nn.Module):
    """A stage that cannot be one graph."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        torch._dynamo.graph_break()
        return y * y


@pytest.mark.filterwarnings("ignore:stage")
def test_the_record_tells_of_stages_that_cannot_run_again(tmp_path: pathlib.Path) -> None:
    """Their replay is refused; the record names the first action, and the picture frames it."""
    inputs, targets = data()
    inputs[2, 0] = float("nan")
    with trainer(tmp_path, block=InParts) as stages, pytest.raises(PipelineError):
        stages.step(inputs, targets)
    picture = tmp_path / "step.svg"
    result = replay(tmp_path, "--picture", picture)
    assert result.exit_code == 2
    assert "0F1 on rank 0: result 0 of 0F1 is not finite, by the record" in result.output
    assert "stage 0 cannot be run again: it has no graph of its own" in result.output
    assert "#ff0000" in picture.read_text()


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert result.exit_code == 2
    assert "is no bundle of the flight recorder" in result.output


def test_a_bundle_of_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "record.json").write_text('{"rank": 0, "steps": []}')
    result = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert result.exit_code == 2
    assert "rank-0 has format 0, and this version of autosplit replays format 2" in result.output


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "run_options": {"split_backward": False}},
        {"schedule": "interleaved"},
        {"stage_options": StageOptions(grad_dtype=torch.float64)},
    ],
    ids=["full backwards", "interleaved", "float64 sums"],
)
def test_other_steps_have_the_bits_of_the_run(
    options: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    run = {"recorder": Recorder(tmp_path, alarms=[alarm]), **options.pop("run_options", {})}
    with PipelineTrainer(
        Block,
        F.mse_loss,
        torch.optim.SGD,
        stages=4,
        microbatches=4,
        ranks=1,
        run_options=RunOptions(**run),
        **options,
    ) as stages:
        stages.step(*data())
    assert "actions have no fault" in replay(tmp_path).output


class Tokens(nn.Module):
    """A whole model with named inputs, one of which all stages take, as they do one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.gain) * scale
        return self.out(x)


def test_a_model_that_was_cut_has_the_bits_of_the_run(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    ids, scale = torch.randint(0, 20, (8, 5)), torch.rand(8, 5, 1)
    with PipelineTrainer(
        Tokens(),
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        torch.optim.SGD,
        stages=3,
        example={"ids": ids[:4], "scale": scale[:4]},
        microbatches=2,
        ranks=1,
        stage_options=StageOptions(planning={"costs": "estimate"}),
        run_options=RunOptions(recorder=Recorder(tmp_path, alarms=[alarm], keep=1)),
    ) as stages:
        stages.step(ids=ids, scale=scale, target=ids)
    assert "18 actions have no fault" in replay(tmp_path).output


def wide(index: int) -> nn.Module:
    """A stage whose parameters are sharded unevenly."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH, bias=index > 0))


def half_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """In torch 2.11, the backward of ``mse_loss`` takes no operands of two dtypes."""
    return F.mse_loss(outputs, targets.to(outputs.dtype))


@ranks(2)
def test_sharded_stages_run_again_from_the_shards_of_all_ranks() -> None:
    """In the gathered dtype."""
    home = pathlib.Path(common_folder())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "pp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with PipelineTrainer(
        wide,
        half_loss,
        torch.optim.SGD,
        stages=2,
        microbatches=4,
        mesh=mesh,
        stage_options=StageOptions(sharding={"mp_policy": policy}),
        run_options=RunOptions(recorder=Recorder(home, alarms=[alarm])),
    ) as stages:
        stages.step(data(dist.get_rank()))
    dist.barrier()
    result = replay(home, "--pipeline", dist.get_rank())
    assert result.output.endswith("24 actions have no fault\n"), result.output
    dist.barrier()
    if dist.get_rank() == 0:
        refuse_missing_shards(home)
    dist.barrier()


def refuse_missing_shards(home: pathlib.Path) -> None:
    (bundle,) = home.iterdir()
    path = bundle / "rank-0" / "record.json"
    facts = json.loads(path.read_text())
    facts["steps"][-1]["actions"]["1F2"]["gave"][0][2] = "other"
    path.write_text(json.dumps(facts))
    assert "1F2 on rank 0: result 0, bf16[] in" in replay(home).output
    shutil.rmtree(bundle / "rank-1")
    missing = "0.weight of stage 0 is sharded over 2 ranks, and the bundle lacks the shards [1]"
    assert missing in replay(home).output


def test_a_loss_that_raises_is_named_with_its_line_and_action(tmp_path: pathlib.Path) -> None:
    raises = [False]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if raises[0]:
            raise ValueError("bad weather")
        return F.mse_loss(output, target)

    with trainer(tmp_path, loss=loss) as stages:
        stages.step(*data())
        raises[0] = True
        with pytest.warns(UserWarning, match=r"wrote step 2.*\. Run: autosplit replay"):
            step_that_raises(stages)
    result = replay(tmp_path)
    assert re.search(r"test_replay\.py:\d+\n  .*ValueError: bad weather\n", result.output)
    assert "Traceback" not in result.output
    assert result.output.endswith("have no fault; 2F0 on rank 0 did not finish\n")
    assert result.exit_code == 1


def step_that_raises(stages: PipelineTrainer) -> None:
    with pytest.raises(AutosplitError):
        stages.step(*data())
