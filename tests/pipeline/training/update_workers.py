"""Optimizer steps on two ranks, for spawned processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError
from tests.pipeline import workers
from tests.pipeline.reference_stage import ReferenceStage


class Drawing(nn.Module):
    """Draws random numbers and writes into a buffer, as a model with dropout and batch norm."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = workers.block(index)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.inner(x))
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean())
        return y + self.mean


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def _train(call: str, factors: list[float], max_norm: float, shared: bool) -> dict[str, Any]:
    """Steps on batches with gradients of changing size, under a learning rate that changes."""
    torch.manual_seed(7 + dist.get_rank())
    holders = [[(0, "inner.0.weight"), (1, "inner.0.weight")]] if shared else []
    with workers.trainer(
        Drawing,
        optimizer_fn=_adam,
        max_grad_norm=max_norm,
        stage_factory=ReferenceStage,
        shared_parameters=holders,
    ) as engine:
        assert engine.optimizer is not None
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.8)
        results: list[Any] = []
        norms = []
        for step, factor in enumerate(factors):
            inputs, targets = workers.data(8, seed=step)
            results.append(getattr(engine, call)((inputs, factor * targets)))
            scheduler.step()
            if call == "step":
                norms.append(engine.grad_norm)
        losses = [each if isinstance(each, Tensor) else each.wait() for each in results]
        state = copy.deepcopy(engine.state_dict())
        return {
            "losses": losses,
            "state": state,
            "norms": norms or [each.norm() for each in results],
        }


def _same(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        "losses": all(map(torch.equal, one["losses"], other["losses"])),
        "norms": one["norms"] == other["norms"],
        "state": all(
            torch.equal(value, other["state"][index][name])
            for index, values in one["state"].items()
            for name, value in values.items()
        ),
        "clipped": [norm > 1.5 for norm in one["norms"]],
    }


FACTORS = [0.1, 0.1, 0.1, 30.0, 30.0, 0.1, 0.1, 0.1, 30.0]


class Breaking(torch.optim.SGD):
    """Raises in its second step on rank 1, when half of its parameters have moved."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise ValueError("bad weather")
        super().step()


def _breaking() -> tuple[str, bool]:
    """What is said, and whether weights and momentum are those before the step."""
    engine = workers.trainer(
        optimizer_fn=lambda parameters: Breaking(parameters, lr=0.5, momentum=0.9),
    )
    engine.step(workers.data(8))
    assert engine.optimizer is not None
    before = copy.deepcopy((engine.state_dict(), engine.optimizer.state_dict()["state"]))
    try:
        engine.step(workers.data(8, seed=1))
    except PipelineError as error:
        text = str(error).splitlines()[0]
    else:
        text = "nothing"
    after = engine.state_dict(), engine.optimizer.state_dict()["state"]
    engine.close()
    dist.barrier()
    return text, _flat(before) == _flat(after)


def _flat(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _flat(each) for key, each in value.items()}
    return [_flat(each) for each in value] if isinstance(value, tuple) else value


def everything() -> dict[str, Any]:
    return {
        "mixed": _same(*(_train(call, FACTORS, 1.5, False) for call in ("step", "step_async"))),
        "shared": _same(*(_train(call, FACTORS, 1.5, True) for call in ("step", "step_async"))),
        "apart": _breaking(),
    }
