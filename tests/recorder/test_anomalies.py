"""The situations of torch's own tests of anomaly mode, in stages of a pipeline: the replay of the
step names the action, the operator and the user's line.
"""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from autosplit.errors import AnomalyError, PipelineError
from autosplit.pipeline import PipelineTrainer, Recorder, RunOptions
from tests.recorder.test_replay import replay

pytestmark = pytest.mark.filterwarnings(
    "ignore:the flight recorder wrote", "ignore:Anomaly Detection", "ignore:Error detected"
)
WIDTH = 4


class FirstGradient(Function):
    """A product whose backward returns a wrong first gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale.new_full((), torch.nan), (grad * x).sum(0)


class SecondGradient(FirstGradient):
    """A product whose backward returns a wrong second gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, torch.log((grad * x).sum(0) * 0 - 1)


class WrongLogarithm(Function):
    """A function that a backward calls."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.log(grad - grad - 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class NestedFunction(FirstGradient):
    """A product whose backward calls another function."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        return WrongLogarithm.apply(grad), (grad * x).sum(0)


@torch.library.custom_op("recorded_anomalies::identity", mutates_args=())
def identity(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("recorded_anomalies::refuse", mutates_args=())
def refuse(grad: Tensor) -> Tensor:
    raise RuntimeError("no backward for this gradient")


identity.register_fake(torch.empty_like)
refuse.register_fake(torch.empty_like)
identity.register_autograd(lambda ctx, grad: refuse(grad))  # type: ignore[misc]


class Program(NamedTuple):
    """A forward that goes wrong.

    Attributes:
        forward: called with the module and its input.
        calls: the actions of stage 0 and of stage 1 in which it goes wrong.
        operator: the operator.
        line: the code of the faulty line.
        error: the class and text of the error under anomaly mode.
    """

    forward: Callable[[Any, Tensor], Tensor]
    calls: tuple[str, str]
    operator: str
    line: str
    error: str = "AnomalyError: backward_"


def pole(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    return torch.sqrt(y * 0)


def dropped_branch(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    return torch.where(y > 100, torch.sqrt(y - y), y)


def infinite_input(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x.detach() * torch.inf)
    return torch.nan_to_num(y, 0, 0, 0) + x * m.scale


def wrong_forward(m: Any, x: Tensor) -> Tensor:
    y = torch.log(m.fc(x) - 1000)
    return y * m.scale


def first_gradient(m: Any, x: Tensor) -> Tensor:
    return FirstGradient.apply(m.fc(x), m.scale)


def second_gradient(m: Any, x: Tensor) -> Tensor:
    return SecondGradient.apply(m.fc(x), m.scale)


def nested_function(m: Any, x: Tensor) -> Tensor:
    return NestedFunction.apply(m.fc(x), m.scale)


def raised_error(m: Any, x: Tensor) -> Tensor:
    return identity(m.fc(x))


INPUT_GRADIENT, WEIGHT_GRADIENT, FORWARD = ("0W0", "1I0"), ("0W0", "1W0"), ("0F0", "1F0")
PROGRAMS = [
    Program(pole, INPUT_GRADIENT, "infinity in aten.div", "return torch.sqrt(y * 0)"),
    Program(dropped_branch, INPUT_GRADIENT, "NaN in aten.div", "torch.sqrt(y - y), y)"),
    Program(infinite_input, WEIGHT_GRADIENT, "NaN in aten.mm", "y = m.fc(x.detach() * torch.inf)"),
    Program(wrong_forward, FORWARD, "NaN in aten.log", "y = torch.log(m.fc(x) - 1000)"),
    Program(
        first_gradient, INPUT_GRADIENT, "NaN in aten", "return grad * scale.new_full((), torch.nan)"
    ),
    Program(second_gradient, WEIGHT_GRADIENT, "NaN in aten.log", "torch.log((grad * x).sum(0)"),
    Program(nested_function, INPUT_GRADIENT, "NaN in aten.log", "torch.log(grad - grad - 1)"),
    Program(
        raised_error,
        INPUT_GRADIENT,
        "no backward for this gradient in torch.ops.recorded_anomalies.refuse",
        "return identity(m.fc(x))",
        "RuntimeError: no backward for this gradient",
    ),
]


class Faulty(nn.Module):
    """A stage that computes a program's forward."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self._program = program

    def forward(self, x: Tensor) -> Tensor:
        return self._program.forward(self, x)


def run_step(module: nn.Module, stage: int, folder: pathlib.Path) -> None:
    """A step of two stages, of which the module is one."""
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    modules[stage] = module
    with PipelineTrainer(
        modules, F.mse_loss, torch.optim.SGD, stages=2, microbatches=2, ranks=1,
        run_options=RunOptions(recorder=Recorder(folder)),
    ) as trainer:  # fmt: skip
        trainer.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


FIRST = (pole, infinite_input, wrong_forward, raised_error)
"""The forwards that run in the first stage, too, whose I does nothing."""
STAGES = [(p, 1) for p in PROGRAMS] + [(p, 0) for p in PROGRAMS if p.forward in FIRST]


@pytest.mark.parametrize(
    ("program", "stage"), STAGES, ids=lambda item: getattr(item, "forward", item)
)
def test_the_replay_of_an_anomaly_names_the_line(
    program: Program, stage: int, tmp_path: pathlib.Path
) -> None:
    with torch.autograd.detect_anomaly(), pytest.raises(PipelineError, match=program.error):
        run_step(Faulty(program), stage, tmp_path)
    named, _, line, *_ = replay(tmp_path).output.partition("\n")[2].split("\n")
    assert named.startswith(f"{program.calls[stage]} on rank 0: ")
    assert program.operator in named
    assert program.line in line


@pytest.mark.parametrize("program", PROGRAMS[:3], ids=lambda program: program.forward.__name__)
def test_the_recorder_finds_what_anomaly_mode_does_not_check(
    program: Program, tmp_path: pathlib.Path
) -> None:
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        pytest.raises(PipelineError, match="gradients are not finite") as raised,
    ):
        run_step(Faulty(program), 1, tmp_path)
    assert not any(isinstance(error, AnomalyError) for error in causes(raised.value))
    output = replay(tmp_path).output
    assert f"\n{program.calls[1]} on rank 0: {program.operator}" in output
    assert program.line in output


def test_an_anomaly_keeps_no_tensor_alive(tmp_path: pathlib.Path) -> None:
    module = Faulty(PROGRAMS[0])
    weight = weakref.ref(module.fc.weight)
    with torch.autograd.detect_anomaly(), pytest.raises(PipelineError):
        run_step(module, 1, tmp_path)
    del module
    gc.collect()
    assert weight() is None
