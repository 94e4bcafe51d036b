"""Models with graph breaks: what is refused, and what is copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from autosplit import SplitError
from autosplit.dynamo.partial_model import Partial
from tests.dynamo.breaking import (
    TwoLayers,
)


def test_optimizer_step_computes_what_is_pending() -> None:
    model = TwoLayers()
    partial = Partial(model)
    partial(torch.randn(3, 4)).sum().backward()
    before = model.a.weight.clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert partial.pending == 0
    torch.testing.assert_close(model.a.weight, before - 0.1 * model.a.weight.grad)


def test_nothing_pending() -> None:
    partial = Partial(TwoLayers())
    partial.backward_weight()
    partial(torch.randn(3, 4)).sum().backward()
    with pytest.raises(SplitError, match=r"microbatches=2\): 1 pending; ask for 1 to 1"):
        partial.backward_weight(microbatches=2)


def test_deferred_tensor_written_in_place() -> None:
    partial = Partial(TwoLayers())
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    partial(x).sum().backward()
    with torch.no_grad():
        x.zero_()
    with pytest.raises(SplitError, match=r"in place between backward\(\) and backward_weight"):
        partial.backward_weight()


def test_error_of_the_model_is_the_users_own() -> None:
    partial = Partial(TwoLayers())
    with pytest.raises(RuntimeError, match=r"h = self\.a\(x\)\.relu\(\)"):
        partial(torch.randn(3, 5))
    partial(torch.randn(3, 4)).sum().backward()
    assert partial.pending == 1


def test_create_graph() -> None:
    partial = Partial(TwoLayers())
    with pytest.raises(SplitError, match="create_graph=True: a split backward"):
        partial(torch.randn(3, 4)).sum().backward(create_graph=True)


def test_deepcopy_is_the_model_with_a_face_of_its_own() -> None:
    model = TwoLayers()
    partial = Partial(model)
    x = torch.randn(3, 4)
    partial(x).sum().backward()
    for twin in (copy.deepcopy(partial), pickle.loads(pickle.dumps(partial))):
        assert twin.pending == 0
        twin(x).sum().backward()
        assert (partial.pending, twin.pending) == (1, 1)
    mine, theirs = dict(partial.named_parameters()), dict(twin.named_parameters())
    assert all(mine[name] is not theirs[name] for name in mine)
