"""What a backward writes: as plain autograd leaves it, where that runs it; stages refuse it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from tests.semantics.against_autograd import assert_equals_autograd
from tests.semantics.backward_writers import WRITERS, Both, Descending, OfAttribute, Writer

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning"  # by Dynamo, in parts
    ),
    pytest.mark.filterwarnings("ignore:.*weight gradients:autosplit.errors.DeferralWarning"),
]

writers = pytest.mark.parametrize("kind", WRITERS)
all_writers = pytest.mark.parametrize("kind", [*WRITERS, OfAttribute])


def batches() -> list[Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return [torch.randn(6, 8, generator=generator) for _ in range(3)]


def plainly(kind: Callable[[], Writer]) -> Writer:
    """The model behind three microbatches."""
    model = kind()
    for x in batches():
        model(x).square().sum().backward()
    return model


def assert_alike(mine: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(mine.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    for (name, ours), theirs in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


@writers
@pytest.mark.parametrize("breaks", [False, True])
def test_split(kind: type[Writer], breaks: bool) -> None:
    assert_equals_autograd(kind(breaks=breaks), [(x,) for x in batches()])


@all_writers
def test_under_torch_compile(kind: type[Writer]) -> None:
    torch._dynamo.reset()
    model = kind()
    compiled = torch.compile(model, backend="autosplit")
    for x in batches():
        compiled(x).square().sum().backward()
    autosplit.backward_weight(model)
    assert_alike(model, plainly(kind))


@all_writers
def test_a_stage_refuses_it(kind: type[Writer]) -> None:
    with pytest.raises(CaptureError, match=r"writes into '(total|history)' \(from |main_grad"):
        autosplit.Stage(kind(), [batches()[0]])


def test_written_in_both_halves() -> None:
    said = r"the backward writes into 'history' \(from .*abs\(\)\.max"
    with pytest.raises(CaptureError, match=said):
        autosplit.split(Both(), fullgraph=True)(batches()[0])
    split = assert_equals_autograd(Both(), [(x,) for x in batches()])
    assert "the backward writes into" in split.report()


def test_written_parameter() -> None:
    """An optimizer inside of the backward."""
    model, plain = Descending(), Descending()
    split = autosplit.split(model)
    for x in batches():
        split(x).square().sum().backward()
        plain(x).square().sum().backward()
        split.backward_weight()
    assert_alike(model, plain)
    assert torch.equal(model.weight, plain.weight)
    assert not torch.equal(model.weight, Descending().weight)
