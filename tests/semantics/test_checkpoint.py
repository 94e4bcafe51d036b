"""``torch.utils.checkpoint`` inside a model: same gradients, same random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.semantics.against_autograd import assert_equals_autograd, assert_same, both_modes, within


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.reentrant = reentrant
        self.dropout = dropout

    def block(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x))
        return F.dropout(h, self.dropout, self.training) if self.dropout else h

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


@both_modes
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_equals_autograd(reentrant: bool, dropout: float, training: bool) -> None:
    batch = [(torch.randn(5, 4).requires_grad_(),) for _ in range(2)]
    # Reentrant checkpoints add to .grad one by one: the same terms in another order.
    compare = within(1e-6) if reentrant else assert_same
    model = Checkpointed(reentrant, dropout).train(training)
    assert_equals_autograd(model, batch, compare=compare)
