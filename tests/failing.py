"""Factories that fail, or return what none should."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.compare import Workload


def raises() -> None:
    raise RuntimeError("my own failure")


def nothing() -> None:
    """No model at all."""


def listed() -> Any:
    return nn.Linear(4, 4), (), [1, 2]


def sized(size: str = "4") -> Any:
    return nn.Linear(int(size), 4), torch.randn(2, int(size))


def fails() -> Any:
    return nn.Linear(4, 4), 5


def _stage(index: int, stages: int) -> nn.Module:
    return nn.Linear(4, 4)


def _batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    raise KeyError("no batch")


def workload() -> Workload:
    return Workload(_stage, nn.functional.mse_loss, _batch, 2, 1)


def lacking() -> Workload:
    """Stages that leave out the middle one of three layers."""

    def stage(index: int, stages: int) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        kept = range(3) if stages == 1 else (2 * index,)
        return nn.Sequential(OrderedDict((str(at), layers[at]) for at in kept))

    def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
        return torch.ones(size, 4), torch.ones(size, 4)

    return Workload(stage, nn.functional.mse_loss, batch, 2, 1)


def dropping() -> Any:
    parts = nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Linear(4, 4)
    return nn.Sequential(*parts), torch.ones(64, 4)


def uncallable() -> Workload:
    return Workload(5, nn.functional.mse_loss, _batch, 2, 1)  # type: ignore[arg-type]


def text() -> Workload:
    return Workload(_stage, nn.functional.mse_loss, _batch, "2", 1)  # type: ignore[arg-type]
