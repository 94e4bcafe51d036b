"""SplitModule against plain autograd, and how it behaves as a module."""

from __future__ import annotations

import copy
import math
import weakref

import pytest
import torch
from torch import nn

import autosplit
from autosplit import SplitError
from tests.gradients import assert_same_gradients
from tests.pending import deferred_tensors
from tests.semantics.against_autograd import assert_equals_autograd
from tests.zoo import CASES, SwiGLU

MODES = [*((name, True) for name in CASES if name != "counter"), ("convolutions", False)]


@pytest.mark.parametrize(("name", "training"), [*MODES, ("encoder_layer", False)])
def test_equals_autograd(name: str, training: bool) -> None:
    """But for what plain autograd refuses: a buffer written between forward and backward."""
    case = CASES[name]
    batches = [case.batch() for _ in range(3)]
    microbatches = [(x.requires_grad_(x.is_floating_point()),) for x in batches]
    assert_equals_autograd(case.build().train(training), microbatches, case.loss)


def test_dropout_draws_as_autograd_does_and_backward_leaves_the_generator_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    reference = copy.deepcopy(model)
    split = autosplit.split(model)
    x = torch.randn(8, 64, requires_grad=True)
    split.capture(x)
    torch.manual_seed(3)
    output = split(x)
    state = torch.get_rng_state()
    output.square().mean().backward()
    split.backward_weight()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    reference(x).square().mean().backward()
    # p = 0.5 scales by a power of two, so the two formulations of dropout round alike.
    assert_same_gradients(model, reference)


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


def test_is_the_model_under_another_face() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    split = autosplit.split(model)
    assert list(split.state_dict()) == list(model.state_dict())
    mine, theirs = dict(split.named_parameters()), dict(model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is theirs[name] for name in mine)
    split.eval()
    assert not model.training
    assert not model[1].training
    split.double()
    assert model[0].weight.dtype is torch.float64


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
    with torch.no_grad():
        split(x)
    split.get_submodule("0").bias.requires_grad_(False)
    split(x)
    assert len(split.functions) == 6


def test_no_grad_saves_nothing() -> None:
    split = autosplit.split(nn.Linear(3, 3))
    with torch.no_grad():
        output = split(torch.randn(2, 3))
    (functions,) = split.functions
    assert not functions.has_backward
    assert not output.requires_grad


def test_frozen_model_behind_an_input_that_needs_a_gradient() -> None:
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


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_step_computes_what_is_pending(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    model = nn.Linear(3, 2)
    split, plain = autosplit.split(model), copy.deepcopy(model)
    other = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    split(x).sum().backward()
    optimizer(other.parameters(), lr=0.1).step()  # not its parameters
    assert split.pending == 1
    plain(x).sum().backward()
    for module in (split, plain):
        optimizer(module.parameters(), lr=0.1).step()
    assert split.pending == 0
    assert torch.equal(model.weight, plain.weight)


def test_nothing_pending() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    split.backward_weight()
    split.discard()
    with pytest.raises(SplitError, match=r"microbatches=1\): 0 pending; call loss.backward\(\)"):
        split.backward_weight(microbatches=1)
    split(torch.randn(4, 3)).sum().backward()
    with pytest.raises(SplitError, match="1 pending; ask for 1 to 1"):
        split.backward_weight(microbatches=2)


def test_second_backward_through_one_output() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    loss = split(torch.randn(4, 3))
    loss.sum().backward()
    with pytest.raises(SplitError, match="a second time through the same call"):
        loss.sum().backward()
    assert split.pending == 1


def test_saved_input_written_in_place() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    output = split(x)
    x.zero_()
    with pytest.raises(SplitError, match=r"written in place .*: args_0\. Run the backward"):
        output.sum().backward()


def test_parameter_written_between_forward_and_backward() -> None:
    split = autosplit.split(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    output = split(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        split.get_submodule("1").weight.add_(1.0)
    with pytest.raises(SplitError, match=r"written in place .*: 1\.weight"):
        output.sum().backward()


def test_deferred_gradient_written_in_place() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    x = torch.randn(4, 3, requires_grad=True)
    h = x * 1.0
    split(h).square().sum().backward()
    with torch.no_grad():
        h.zero_()
    late = r"between backward\(\) and backward_weight\(\): args_0\. Call backward_weight\(\) before"
    with pytest.raises(SplitError, match=late):
        split.backward_weight()


def test_microbatch_dies_with_its_weight_gradients() -> None:
    """Nothing of a microbatch outlives ``backward_weight()``; before it, only the deferred."""
    split = autosplit.split(SwiGLU())
    x = torch.randn(2, 4, 16, requires_grad=True)
    output = split(x)
    loss = output.sum()
    loss.backward()
    died = weakref.ref(output)
    del output, loss
    assert died() is None
    refs = [weakref.ref(tensor) for tensor in deferred_tensors(split) if tensor is not x]
    assert refs
    split.backward_weight()
    assert [ref() for ref in refs if ref() is not None] == []
