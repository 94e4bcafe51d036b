"""Loss scaling by torch's GradScaler, with one decision on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers
from tests.trainer.test_nonfinite import infinite, kinked, weights

ROWS, COUNT, NORM = 8, 4, 0.5


def scaler(**options: Any) -> torch.amp.GradScaler:
    """Backs off from a scale that overflows, and grows again soon."""
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**22, "growth_interval": 2, **options})


def trainer(model: Any = workers.block, **options: Any) -> PipelineTrainer:
    return workers.trainer(model, stage_factory=None, **{"grad_scaler": scaler(), **options})


def test_steps_equal_those_of_torch_under_float16() -> None:
    """Scales, skipped steps and weights, with clipping."""
    model, reference = workers.whole(2), scaler()
    optimizer = workers.sgd([*model.parameters()])
    with trainer(ranks=1, autocast=torch.float16, max_grad_norm=NORM) as engine:
        skipped = 0
        for step in range(8):
            inputs, targets = workers.data(ROWS, step)
            for x, y in zip(inputs.chunk(COUNT), targets.chunk(COUNT), strict=True):
                with torch.autocast("cpu", torch.float16):
                    loss = F.mse_loss(model(x), y)
                reference.scale(loss / COUNT).backward()  # type: ignore[no-untyped-call]
            reference.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            earlier = reference.get_scale()
            reference.step(optimizer)
            reference.update()
            optimizer.zero_grad()
            skipped += reference.get_scale() < earlier
            losses = engine.step((inputs, targets))
            assert losses.mean().item() == pytest.approx(engine.metrics()["loss"])
            assert engine.metrics()["scale"] == reference.get_scale()
        assert engine.metrics()["skipped"] == skipped > 1
        for mine, other in zip(weights(engine), model.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach())


@pytest.mark.parametrize("call", ["step", "step_async"])
def test_steps_of_several_batches_equal_those_of_torch(call: str) -> None:
    """Weights, scale and growth: a step is dropped whole, and updates the scale once."""
    model, reference = workers.whole(2), scaler(growth_interval=3)
    optimizer = workers.sgd([*model.parameters()])
    good, bad = workers.data(ROWS), infinite()
    with trainer(ranks=1, grad_scaler=scaler(growth_interval=3)) as engine:
        mine: Any = engine.grad_scaler
        steps = ((good, bad, good), (bad, good), (bad, bad), (good, good), (good,), (good, good))
        for batches in steps:
            for inputs, targets in batches:
                for x, y in zip(inputs.chunk(COUNT), targets.chunk(COUNT), strict=True):
                    loss = F.mse_loss(model(x), y)
                    reference.scale(loss / COUNT).backward()  # type: ignore[no-untyped-call]
            reference.step(optimizer)
            reference.update()
            optimizer.zero_grad()
            for batch in batches[:-1]:
                engine.forward_backward(batch)
            getattr(engine, call)(batches[-1])
            assert mine.state_dict() == reference.state_dict()
            assert not any(engine.gradients().values())
            for weight, other in zip(weights(engine), model.parameters(), strict=True):
                torch.testing.assert_close(weight, other.detach())
        assert engine.metrics()["skipped"] == 3


def test_the_user_may_not_call_the_optimizer_of_a_scaled_step() -> None:
    with trainer(ranks=1) as engine:
        engine.forward_backward(workers.data(ROWS))
        with pytest.raises(
            PipelineError, match=r"pass the last batch of the step to trainer\.step"
        ):
            engine.optimizer.step()  # type: ignore[union-attr]


def test_accumulated_gradients_are_those_without_a_scale() -> None:
    """Of parameters and of the batch, with weights."""
    results: list[list[Tensor]] = []
    for options in ({"grad_scaler": None}, {"grad_scaler": scaler()}):
        with trainer(ranks=1, **options) as engine:
            inputs, targets = workers.data(ROWS)
            inputs.requires_grad_()
            for _ in range(2):
                engine.forward_backward((inputs, targets), weight=[1.0, 2.0, 3.0, 4.0])
            gradients = [g.clone() for row in engine.gradients().values() for g in row.values()]
            assert inputs.grad is not None
            results.append([*gradients, inputs.grad])
    torch.testing.assert_close(*results)


@ranks(2)
@pytest.mark.parametrize("call", ["step", "step_async"])
def test_ranks_with_finite_gradients_do_as_the_others(call: str) -> None:
    """Only rank 0 has gradients that are not finite."""
    with trainer(kinked) as engine:
        earlier = weights(engine)
        getattr(engine, call)(workers.data(ROWS))
        assert (engine.metrics()["scale"], engine.metrics()["skipped"]) == (2.0**21, 1)
        assert all(map(torch.equal, earlier, weights(engine)))
    with pytest.raises(PipelineError, match=r"grad_scaler is .*'scale': 4.0.* on rank 0"):
        trainer(grad_scaler=scaler(init_scale=4.0 + engine.rank))


def test_checkpoints_have_the_state_of_the_scaler(tmp_path: Path) -> None:
    with trainer(ranks=1) as engine:
        engine.step(workers.data(ROWS))
        state = engine.grad_scaler.state_dict()  # type: ignore[union-attr]
        save_checkpoint(engine, tmp_path / "saved", names="{}.{}".format)
    with trainer(ranks=1, grad_scaler=scaler(init_scale=2.0)) as engine:
        load_checkpoint(engine, tmp_path / "saved", names="{}.{}".format)
        assert engine.grad_scaler.state_dict() == state  # type: ignore[union-attr]


def test_a_disabled_scaler_scales_nothing() -> None:
    with trainer(ranks=1, grad_scaler=scaler(enabled=False)) as engine:
        engine.step(workers.data(ROWS))
        assert not {"scale", "skipped"} & engine.metrics().keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_scaler": 2.0}, "must be a torch.amp.GradScaler or None; got a float"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' has no effect together with grad_scaler"),
        ({"autocast": torch.float64}, "autocast must be None, .* got torch.float64"),
    ],
)
def test_wrong_combinations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        trainer(ranks=1, **options)
