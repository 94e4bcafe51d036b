"""``autosplit.split`` of models that no single graph holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autosplit
from tests.dynamo.breaking import TwoLayers
from tests.gradients import assert_same_gradients

RECOMPUTED = CheckpointPolicy.PREFER_RECOMPUTE


class Selecting(nn.Module):
    """Dynamo ends with an error of its own at the function that the forward makes, when a graph
    before it has run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(x))
        torch._dynamo.graph_break()

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(lambda *_, **__: RECOMPUTED)

        run: Any = lambda x: self.inner(x).tanh()  # noqa: E731
        return checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def test_a_model_that_fails_in_parts_too_runs_unsplit() -> None:
    model = Selecting()
    plain, split = copy.deepcopy(model), autosplit.split(model)
    x = torch.randn(8, 4)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"(?s)Selecting runs .* unsplit.*test_fallback.py"):
        split(x).sum().backward()
    split(x).sum().backward()
    torch.manual_seed(0)
    for _ in range(2):
        plain(x).sum().backward()
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert_same_gradients(model, plain)
    assert "2 call(s) of Selecting ran unsplit" in split.report()
    assert split.pending == 0


class Passing(TwoLayers):
    """Puts out a parameter, beside a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.a.weight


def test_nothing_deferred_is_nothing_to_do() -> None:
    model = Passing()
    split = autosplit.split(model)
    for _ in range(2):
        split(torch.randn(3, 4)).sum().backward()
        split.backward_weight()
    assert split.pending == 0
    assert torch.equal(model.a.weight.grad, torch.full((4, 4), 2.0))
