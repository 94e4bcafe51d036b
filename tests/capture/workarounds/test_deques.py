"""Deques with a maximum, which Dynamo traces without it: read as eager mode reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import autosplit


class Window(nn.Module):
    """Scales its output by the sum of the last two means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.means: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(x.detach().mean())
        y: Tensor = self.layer(x)
        return y * sum(self.means)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="autosplit", **options)


@pytest.mark.parametrize("face", [autosplit.split, compiled])
def test_the_oldest_item_is_gone(face: Callable[..., Any]) -> None:
    model = Window()
    call = face(model)
    for mean in range(4):
        x = torch.full((2, 4), float(mean))
        assert torch.equal(call(x), model.layer(x) * (mean + max(mean - 1, 0)))


def test_one_graph_of_torch_compile_refuses_the_write() -> None:
    torch._dynamo.reset()  # a skipped function stays skipped
    with pytest.raises(BackendCompilerFailed, match="deque of at most 2 items"):
        compiled(Window(), fullgraph=True)(torch.ones(2, 4))
