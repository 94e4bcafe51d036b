"""Auxiliary losses that forwards leave on modules of any stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import CaptureError, PipelineError, PlanError, PythonStateError
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
    return torch.stack(values).sum()


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
