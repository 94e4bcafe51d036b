"""A small model, and the ways in which its weight gradients are deferred."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autosplit
from autosplit.dynamo.pending_weights import backward_weight, pending_queues
from tests.dynamo.by_graphs import split_by_graphs
from tests.pending import pending_of_compiled


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


class Compiled:
    """A model under ``torch.compile(backend="autosplit")``, with the face of a split one."""

    def __init__(self, model: nn.Module, max_pending: float = math.inf) -> None:
        options = {"max_pending": max_pending}
        self.module: Any = torch.compile(model, backend="autosplit", options=options)
        self._model = model
        self.backward_weight = partial(backward_weight, model)

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    @property
    def pending(self) -> int:
        return pending_of_compiled(self._model)

    def discard(self) -> None:
        for queue in pending_queues(self._model):
            queue.discard_all()


FACES: dict[str, Callable[[nn.Module], Any]] = {
    "whole": partial(autosplit.split, max_pending=math.inf),
    "parts": split_by_graphs,
    "compiled": Compiled,
}


def model_for(face: str) -> Net:
    """One graph where the face needs one, two where it is for models of several."""
    torch._dynamo.reset()
    return Net() if face == "whole" else Broken()
