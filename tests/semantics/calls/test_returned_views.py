"""Views of parameters and inputs as results, alone or beside others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.semantics.against_autograd import assert_equals_autograd

VIEWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mT alone": lambda own, x: own.weight.mT,
    "T alone": lambda own, x: own.weight.T,
    "behind another": lambda own, x: (own.layer(x), own.weight.mT),
    "before another": lambda own, x: (own.weight.H, own.layer(x)),
    "of the input": lambda own, x: (own.layer(x), x.mT),
    "computed with": lambda own, x: (own.layer(x), own.weight.T * 2),
}


class Returning(nn.Module):
    def __init__(self, view: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.layer = nn.Linear(4, 4)
        self.view = view

    def forward(self, x: Tensor) -> Any:
        return self.view(self, x)


@pytest.mark.parametrize("name", VIEWS)
def test_returned(name: str) -> None:
    batch = [(torch.randn(2, 4, requires_grad=True),) for _ in range(2)]
    split = assert_equals_autograd(Returning(VIEWS[name]), batch, fullgraph=True)
    assert len(split.functions) == 1
