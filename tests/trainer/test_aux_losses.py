"""Auxiliary losses that forwards leave on modules of any stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import (
    AutosplitError,
    CaptureError,
    PipelineError,
    PlanError,
    PythonStateError,
)
from autosplit.pipeline import PipelineTrainer, StageOptions
from tests.kept_ranks import ranks
from tests.pipeline import workers

ROWS, COUNT = 8, 4
WEIGHTS = {"aux_loss": 0.5, "z_loss": 0.25}


class Router(nn.Module):
    """Leaves losses on itself; a plain attribute, if it is not declared."""

    def __init__(self, name: str, *, declared: bool = True) -> None:
        super().__init__()
        self.name = name
        self.gate = nn.Linear(workers.WIDTH, workers.WIDTH)
        if declared:
            setattr(self, name, None)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        setattr(self, self.name, gates.mean(0).square().sum())
        return x * gates


def stage(index: int) -> nn.Module:
    """Two routers of one name in stage 0, and one of another name in stage 2."""
    torch.manual_seed(index)
    routers = {0: [Router("aux_loss"), Router("aux_loss")], 2: [Router("z_loss")]}
    return nn.Sequential(nn.Linear(workers.WIDTH, workers.WIDTH), *routers.get(index, []))


def left(model: nn.Module, name: str) -> Tensor:
    values = [getattr(m, name) for m in model.modules() if getattr(m, "name", "") == name]
    return torch.stack(values).sum() if values else torch.zeros(())


def reference(
    inputs: Tensor, targets: Tensor, model: nn.Module | None = None
) -> tuple[Any, dict[str, float]]:
    """The whole model with its gradients, and the means."""
    model = model or nn.Sequential(*map(stage, range(3)))
    sums = dict.fromkeys(["loss", *WEIGHTS], 0.0)
    for x, y in zip(inputs.chunk(COUNT), targets.chunk(COUNT), strict=True):
        loss = F.mse_loss(model(x), y)
        aux = {name: left(model, name) for name in WEIGHTS}
        total = loss + sum(weight * aux[name] for name, weight in WEIGHTS.items())
        (total / COUNT).backward()
        for name, value in {"loss": loss, **aux}.items():
            sums[name] += value.item() / COUNT
    return model, sums


def trainer(model: Any = stage, **options: Any) -> PipelineTrainer:
    options = {"aux_losses": WEIGHTS, "stage_factory": None, **options}
    return workers.trainer(model, stages=3, **options)


@ranks(2)
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_they_are_trained_with_the_loss_and_logged_on_all_ranks(scale: float | None) -> None:
    batch = workers.data(ROWS)
    model, means = reference(*batch)
    scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
    with trainer(grad_scaler=scaler) as engine:
        engine.evaluate(batch)
        assert engine.evaluation == pytest.approx(means)
        for times in (1, 2):  # attributes and sums begin anew
            losses = engine.forward_backward(batch)
            assert losses.mean().item() == pytest.approx(means["loss"])
            assert {name: engine.metrics()[name] for name in means} == pytest.approx(means)
            for index, gradients in engine.gradients().items():
                for name, gradient in gradients.items():
                    expected = times * model[index].get_parameter(name).grad
                    torch.testing.assert_close(gradient, expected)


def test_with_parts_of_the_loss_in_one_stage_under_autocast() -> None:
    def loss_fn(output: Tensor, targets: Tensor) -> Any:
        return F.mse_loss(output, targets), {"mean": output.mean()}

    with workers.trainer(
        [stage(0)],
        loss_fn=loss_fn,
        aux_losses={"aux_loss": 1.0},
        stage_factory=None,
        ranks=1,
        autocast=torch.bfloat16,
    ) as engine:
        engine.step(workers.data(ROWS))
        assert {"loss", "mean", "aux_loss"} < engine.metrics().keys()


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_names_that_no_module_has_are_refused(call: str) -> None:
    message = r"aux_losses has 'other', and no module of any stage has this attribute"
    with (
        trainer(ranks=1, aux_losses={"aux_loss": 1.0, "other": 1.0}) as engine,
        pytest.raises(PipelineError, match=message),
    ):
        getattr(engine, call)(workers.data(ROWS))


class Deep(nn.Module):
    """Routers in both stages of a model that is cut: two equal ones in the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(workers.WIDTH, workers.WIDTH), Router("aux_loss"))
        self.layers = nn.ModuleList([Router("aux_loss", declared=False), Router("z_loss")])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def cut_trainer(model: nn.Module, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model,
        F.mse_loss,
        workers.sgd,
        microbatches=COUNT,
        stages=2,
        example=workers.data(ROWS)[0][: ROWS // COUNT],
        ranks=1,
        stage_options=StageOptions(
            planning={"cut_at": ["layers.1"], "costs": "estimate"}, **options
        ),
    )


def test_those_of_a_model_that_is_cut_are_trained_in_their_stages() -> None:
    inputs, targets = workers.data(ROWS)
    plain, means = reference(inputs, targets, Deep())
    with cut_trainer(Deep(), aux_losses=WEIGHTS) as engine:
        engine.evaluate((inputs, targets))
        assert engine.evaluation == pytest.approx(means)
        engine.forward_backward((inputs, targets))
        assert {name: engine.metrics()[name] for name in means} == pytest.approx(means)
        first, last = engine.gradients().values()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert {*last} == {"layers.1.gate.weight", "layers.1.gate.bias"}
    for name, gradient in {**first, **last}.items():
        torch.testing.assert_close(gradient, expected.pop(name))
    assert not expected


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (
            ["aux_loss", "z_loss", "other"],
            PlanError,
            "has 'other', which the forward of Deep sets on",
        ),
        (["aux_loss"], CaptureError, r"changes Python state, self\.layers\.1\.z_loss"),
    ],
)
def test_a_model_that_is_cut_leaves_what_is_named(
    names: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cut_trainer(Deep(), aux_losses=dict.fromkeys(names, 1.0))


def test_an_attribute_that_is_not_declared_is_refused() -> None:
    model = [Router("aux_loss"), Router("aux_loss", declared=False)]
    with (
        workers.trainer(model, ranks=1, stage_factory=None, aux_losses={"aux_loss": 1.0}) as engine,
        pytest.raises(PythonStateError, match=r"changes Python state, .*aux_loss"),
    ):
        engine.step(workers.data(ROWS))


class Gate(nn.Module):
    """Returns what its router computes, and what it passes on."""

    def __init__(self, *, frozen: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.router = Router("aux_loss")
        self.frozen, self.breaks = frozen, breaks

    def forward(self, x: Tensor) -> Any:
        if self.breaks:
            torch._dynamo.graph_break()
        routed = self.router(x)
        return (x.round().long(), x.detach()) if self.frozen else (routed, 2 * x)


class Last(nn.Module):
    """Uses the second of its inputs only."""

    def __init__(self, *, detaches: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(workers.WIDTH, workers.WIDTH)
        self.detaches = detaches

    def forward(self, routed: Tensor, x: Tensor) -> Tensor:
        return self.linear(x.detach() if self.detaches else x)


class Counts(nn.Module):
    """Returns integers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router("aux_loss")

    def forward(self, x: Tensor) -> Tensor:
        return (self.router(x)[:, 0] > 0).long()


class InTurn(nn.Sequential):
    """Stages whose results are the next one's arguments."""

    def forward(self, x: Any) -> Any:
        for part in self:
            x = part(*x) if isinstance(x, tuple) else part(x)
        return x


@pytest.mark.filterwarnings("ignore:stage 1 .*runs as several graphs")
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
@pytest.mark.parametrize(
    ("gate", "last"),
    [
        ({}, {}),
        ({}, {"detaches": True}),
        ({"frozen": True}, {}),
        ({"breaks": True}, {}),
        ({"breaks": True}, {"detaches": True}),
    ],
    ids=["unused", "detached", "frozen", "in parts", "in parts and detached"],
)
def test_they_are_trained_if_outputs_get_no_gradient(
    gate: dict[str, bool], last: dict[str, bool], schedule: str
) -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(workers.WIDTH, workers.WIDTH), Gate(**gate), Last(**last)]
    model = InTurn(*copy.deepcopy(stages)).double()
    batch = [part.double() for part in workers.data(ROWS)]
    plain, means = reference(*batch, model)
    weights = {"aux_loss": WEIGHTS["aux_loss"]}
    with workers.trainer(
        [part.double() for part in stages],
        ranks=1,
        microbatches=COUNT,
        stage_factory=None,
        aux_losses=weights,
        schedule=schedule,
    ) as engine:
        assert engine.verify(batch).bits_equal
        engine.forward_backward(batch)
        assert engine.metrics()["aux_loss"] == pytest.approx(means["aux_loss"], rel=1e-14)
        gradients = engine.gradients()
    for index, part in enumerate(plain):
        for name, parameter in part.named_parameters():
            expected = parameter.grad
            torch.testing.assert_close(gradients[index].get(name), expected, rtol=1e-13, atol=0)


def test_a_stage_without_an_output_that_carries_their_gradient_is_refused() -> None:
    model = [Counts(), nn.Embedding(2, workers.WIDTH)]
    with (
        workers.trainer(model, ranks=1, stage_factory=None, aux_losses={"aux_loss": 1.0}) as engine,
        pytest.raises(AutosplitError, match=r"\(Counts\) has an auxiliary loss, and no output of"),
    ):
        engine.step(workers.data(ROWS))
