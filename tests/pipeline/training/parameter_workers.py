"""Parameters that stages share, frozen ones and hooked ones, trained by spawned processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pipeline.workers import (
    WIDTH,
    block,
    data,
    gradients_equal,
    sgd,
    single_process,
    trainer,
    whole,
)


class Tied(nn.Module):
    """One end of a model whose ends share a weight."""

    def __init__(self, index: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(50 + index)
        self.tied = nn.Parameter(torch.randn(width, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.tied))


def shared(stages: int, **more: Any) -> dict[str, bool]:
    """Stage 0 and the last one share their weight; held against a model with one weight."""
    last = stages - 1
    inputs, targets = data(8)
    ends = Tied(0)
    model = nn.Sequential(ends, *[block(index) for index in range(1, last)], ends)
    expected = single_process(model, inputs, targets, 4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with trainer(
        lambda index: Tied(index) if index in (0, last) else block(index),
        stages=stages,
        shared_parameters=[[(0, "tied"), (last, "tied")]],
        max_grad_norm=1e9,
        **more,
    ) as engine:
        found = {"losses": torch.equal(engine.forward_backward((inputs, targets)), expected)}
        found["norm"] = abs((engine.grad_norm or 0.0) - float(norm)) < 1e-5
        # A second pass without a step in between adds the same again, and once.
        engine.forward_backward((inputs, targets))
        grads = engine.gradients()
        for index in engine.modules:
            for name, p in model[index].named_parameters():
                if p.grad is not None:
                    found[f"{index}.{name}"] = torch.allclose(
                        grads[index][name], 2 * p.grad, rtol=1e-5, atol=1e-7
                    )
        return found


def tied_in_a_list(**more: Any) -> dict[str, bool]:
    """Three modules of which the ends have one parameter; nobody says so."""

    def build() -> list[nn.Module]:
        ends = Tied(0), Tied(2)
        ends[1].tied = ends[0].tied
        return [ends[0], block(1), ends[1]]

    stages = build()
    model = nn.Sequential(*stages)
    optimizer = sgd(list(model.parameters()))
    found = {}
    with trainer(build(), **more) as engine:
        for step in range(2):
            inputs, targets = data(8, seed=step)
            expected = single_process(model, inputs, targets, 4)
            optimizer.step()
            optimizer.zero_grad()
            losses = engine.step((inputs, targets))
            found[f"losses {step}"] = torch.allclose(losses, expected, rtol=1e-5)
        for index, module in engine.modules.items():
            for name, value in module.named_parameters():
                same = torch.allclose(value, stages[index].get_parameter(name), atol=1e-6)
                found[f"{index}.{name}"] = same
    return found


def some_are_not_moved() -> tuple[list[float], list[float]]:
    """The norms of three clipped steps whose optimizer leaves biases alone, and those expected."""

    def matrices(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd([p for p in parameters if p.dim() > 1])

    model = whole(2)
    optimizer = matrices(list(model.parameters()))
    found, expected = [], []
    with trainer(optimizer_fn=matrices, max_grad_norm=0.1) as engine:
        for step in range(3):
            inputs, targets = data(8, seed=step)
            single_process(model, inputs, targets, 4)
            expected.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            model.zero_grad()
            engine.step((inputs, targets))
            found.append(engine.grad_norm or 0.0)
    return found, expected


def frozen(stage: int, **more: Any) -> dict[str, Any]:
    """One of three stages is frozen. Nothing comes back to the first, but through the others."""
    inputs, targets = data(8)
    model = whole(3)
    model[stage].requires_grad_(False)
    expected = single_process(model, inputs, targets, 4)
    stages = list(whole(3))
    stages[stage].requires_grad_(False)
    with trainer(stages, **more) as engine:
        losses = engine.forward_backward((inputs, targets))
        grads = engine.gradients()
    return {
        "losses": torch.equal(losses, expected),
        "none": not grads.pop(stage, {}),
        "grads": gradients_equal(grads, model),
    }


def hooked(**more: Any) -> bool:
    """Clamps the gradients of weights, each microbatch's by itself."""
    model, stages = whole(2), [block(0), block(1)]
    for module in (*model, *stages):
        module.get_parameter("0.weight").register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    inputs, targets = data(8)
    single_process(model, inputs, targets, 4)
    with trainer(stages, stage_factory=None, **more) as engine:
        engine.forward_backward((inputs, targets))
        return gradients_equal(engine.gradients(), model)
