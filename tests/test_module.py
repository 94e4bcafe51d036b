"""SplitModule against plain autograd, and how it behaves as a module."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autosplit
from autosplit import SplitError
from tests.semantics.against_autograd import assert_equals_autograd
from tests.zoo import CASES

MODES = [*((name, True) for name in CASES if name != "counter"), ("convolutions", False)]


@pytest.mark.parametrize(("name", "training"), [*MODES, ("encoder_layer", False)])
def test_split_modules_equal_autograd(name: str, training: bool) -> None:
    """Without "counter": autograd refuses a buffer written between forward and backward."""
    case = CASES[name]
    batches = [case.batch() for _ in range(3)]
    microbatches = [(x.requires_grad_(x.is_floating_point()),) for x in batches]
    assert_equals_autograd(case.build().train(training), microbatches, case.loss)


def test_backward_weight_takes_the_oldest_first() -> None:
    split = autosplit.split(nn.Linear(2, 1, bias=False), max_pending=math.inf)
    for value in (1.0, 10.0, 100.0):
        split(torch.full((1, 2), value)).sum().backward()
    split.backward_weight(microbatches=1)
    assert split.pending == 2
    split.backward_weight(microbatches=1)
    assert split.pending == 1
    assert split.weight.grad.tolist() == [[111.0, 111.0]]  # has the last one computed
    assert split.pending == 0


def test_pending_bytes_are_distinct_storage() -> None:
    split = autosplit.split(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    x = torch.randn(32, 8, requires_grad=True)
    assert split.pending_bytes == 0
    split(x).square().mean().backward()
    # W needs x [32, 8], relu [32, 16], and the two dY: [32, 16] and [32, 4]; all float32.
    assert split.pending_bytes == 4 * 32 * (8 + 16 + 16 + 4)
    split.backward_weight()
    assert split.pending_bytes == 0


def test_one_graph_for_each_signature() -> None:
    split = autosplit.split(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)))
    x = torch.randn(2, 3)
    split(x)
    split(x.clone())
    assert len(split.functions) == 1
    split(torch.randn(4, 3))
    split(x.requires_grad_())
    split.eval()
    split(x)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.float16)):
        with mode:
            split(x)
    split.get_submodule("0").bias.requires_grad_(False)
    split(x)
    assert len(split.functions) == 6


def test_no_grad_captures_nothing() -> None:
    split, x = autosplit.split(nn.Linear(3, 3)), torch.randn(2, 3)
    with torch.no_grad():
        output = split(x)
        assert torch.equal(output, split.unsplit(x))
    assert split.functions == ()
    assert not output.requires_grad


def test_an_input_of_a_frozen_model_gets_its_gradient() -> None:
    model = nn.Linear(3, 3).requires_grad_(False)
    split = autosplit.split(model)
    x = torch.randn(2, 3, requires_grad=True)
    split(x).sum().backward()
    split.backward_weight()
    assert torch.equal(x.grad, model.weight.sum(0).expand(2, 3))
    assert model.weight.grad is None


def test_first_gradient_is_not_copied() -> None:
    """As in plain autograd, ``.grad`` is the very tensor that W computed."""
    split = autosplit.split(nn.Linear(256, 256, bias=False))
    split(torch.randn(2, 256)).sum().backward()
    with torch.profiler.profile(acc_events=True) as profile:
        split.backward_weight()
    names = {event.name for event in profile.events()}
    assert "aten::mm" in names
    assert not names & {"aten::clone", "aten::copy_"}


def test_a_number_of_microbatches_that_are_not_pending_is_refused() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    split.backward_weight()
    split.discard()
    with pytest.raises(
        SplitError, match=r"microbatches=1\), but microbatches pending: 0; call loss.backward\(\)"
    ):
        split.backward_weight(microbatches=1)
    split(torch.randn(4, 3)).sum().backward()
    for wrong in (2, "2", 1.0):
        with pytest.raises(
            SplitError, match=f"={wrong!r}., but microbatches pending: 1; pass 1 to 1"
        ):
            split.backward_weight(microbatches=wrong)


def test_backward_refuses_a_saved_input_that_was_written_in_place() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    output = split(x)
    x.zero_()
    with pytest.raises(SplitError, match=r"written in place .*: args_0\. Run the backward"):
        output.sum().backward()


def test_backward_refuses_a_parameter_that_was_written_since_the_forward() -> None:
    split = autosplit.split(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    output = split(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        split.get_submodule("1").weight.add_(1.0)
    with pytest.raises(SplitError, match=r"written in place .*: 1\.weight"):
        output.sum().backward()


def test_backward_weight_refuses_a_deferred_tensor_that_was_written_in_place() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    x = torch.randn(4, 3, requires_grad=True)
    h = x * 1.0
    split(h).square().sum().backward()
    with torch.no_grad():
        h.zero_()
    late = r"between backward\(\) and backward_weight\(\): args_0\. Call backward_weight\(\) before"
    with pytest.raises(SplitError, match=late):
        split.backward_weight()
