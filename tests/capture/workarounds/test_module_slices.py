"""Slices of module lists are traced without a Python function for each module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import UserFunctionVariable

import autosplit
from tests.zoo import Made


class Renaming(nn.ModuleList):
    """A list whose ``add_module`` does more than torch's."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(f"{name}_", module)


def run_slice(model: Any, x: Tensor) -> Tensor:
    part = model.parts[1:]
    for name, module in part.named_children():
        x = module(x) * (1 + int(name.rstrip("_"))) + len(name)
    return x


def made(kind: type[nn.ModuleList]) -> nn.Module:
    return Made(run_slice, parts=kind([nn.Linear(2, 2) for _ in range(3)]))


@pytest.mark.parametrize(("kind", "added"), [(nn.ModuleList, 0), (Renaming, 4)])
def test_slices(kind: type[nn.ModuleList], added: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, *args: Any) -> Any:
        traced.append(function.fn.__name__)
        return original(function, *args)

    monkeypatch.setattr(UserFunctionVariable, "call_function", call_function)
    model, x = made(kind), torch.randn(2, 2)
    assert torch.equal(autosplit.split(model)(x), model(x))
    assert traced.count("add_module") == added
