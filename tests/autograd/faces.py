"""A small model, and the ways in which its weight gradients are deferred."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autosplit
from autosplit.dynamo.partial_model import Partial


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Broken(Net):
    """No single graph holds it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="autosplit", options={"max_pending": math.inf})


FACES: dict[str, Callable[[nn.Module], Any]] = {
    "whole": partial(autosplit.split, max_pending=math.inf),
    "parts": Partial,
    "compiled": compiled,
}


def model_for(face: str) -> Net:
    """One graph where the face needs one, two where it is for models of several."""
    torch._dynamo.reset()
    return Net() if face == "whole" else Broken()
