"""Whatever is done again, done early or left for later: gradients are those of autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autosplit import SplitError, Stage, split
from autosplit.passes import MEMORY
from autosplit.passes.memory_policy import Memory
from tests.semantics.against_autograd import assert_equals_autograd
from tests.zoo import CASES, PlainParameters, SwiGLU

NAMES = ["transformer", "convolutions", "tied", "repeated", "in_place", "plain_parameters"]
NAMES += ["frozen", "bfloat16"]

# Models of a test's size do nothing again under the settings that there are: calling an
# operator takes longer than all of its work.
AGAIN = Memory("again", recompute=100.0)
AGAIN_AND_EARLY = Memory("again and early", recompute=100.0, waiting=0.3)


@pytest.mark.parametrize("setting", [AGAIN, AGAIN_AND_EARLY], ids=lambda setting: setting.name)
@pytest.mark.parametrize("name", NAMES)
def test_split_module(name: str, setting: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMORY, "balanced", setting)
    case = CASES[name]
    batches = [(case.batch(),) for _ in range(2)]
    for (batch,) in batches:
        batch.requires_grad_(batch.is_floating_point())
    assert_equals_autograd(case.build(), batches, case.loss)


@pytest.mark.parametrize("memory", ["lean", 20_000])
def test_first_stage_with_norms_before_layers(memory: str | int) -> None:
    """A residual stream in which no input needs a gradient: nothing has to be in I."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(11, 16), encoder, nn.Linear(16, 11))
    batches = [(torch.randint(11, (2, 6)),) for _ in range(2)]
    assert_equals_autograd(model, batches, lambda y: y.square().mean(), memory=memory)


@pytest.mark.parametrize("memory", ["lean", 4096])
@pytest.mark.parametrize("name", ["transformer", "convolutions", "repeated"])
def test_stage(name: str, memory: str | int) -> None:
    case = CASES[name]
    model = case.build()
    twin = copy.deepcopy(model)
    batches = [case.batch() for _ in range(3)]
    stage = Stage(model, [batches[0].clone().requires_grad_()], memory=memory)
    grads = [torch.randn(stage.output_specs[0][0]) for _ in batches]
    for m, batch in enumerate(batches):
        stage.forward(m, [batch.clone()])
    for m, grad in enumerate(grads):
        stage.backward_input(m, [grad.clone()])
    assert memory == "lean" or stage.deferred_bytes <= 3 * 4096
    for m in range(3):
        stage.backward_weight(m)
    stage.publish()
    for batch, grad in zip(batches, grads, strict=True):
        twin(batch.clone().requires_grad_()).backward(grad)
    for (key, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), key


def test_fused_accumulation_adds_early_gradients_too() -> None:
    model = SwiGLU()
    example = torch.randn(2, 4, 16, requires_grad=True)
    stage = Stage(model, [example], memory=0, accumulation="fused", grad_dtype=torch.float64)
    assert stage.functions.late_parameters == []
    for m in range(2):
        stage.forward(m, [torch.ones(2, 4, 16)])
        stage.backward_input(m, [torch.ones(2, 4, 16)])
        stage.backward_weight(m)
    assert {gradient.dtype for gradient in stage.gradients.values()} == {torch.float64}
    expected = 2 * torch.autograd.grad(model(torch.ones(2, 4, 16)).sum(), model.down.weight)[0]
    torch.testing.assert_close(stage.gradients["down.weight"], expected.double(), rtol=1e-6, atol=0)


def test_budget_bounds_what_a_microbatch_holds() -> None:
    x = torch.randn(2, 4, 16, requires_grad=True)
    most = _deferred_bytes(SwiGLU(), x, "balanced")
    some = _deferred_bytes(SwiGLU(), x, most - 100)
    assert 0 < some <= most - 100
    assert _deferred_bytes(SwiGLU(), x, some) == some
    assert _deferred_bytes(SwiGLU(), x, 10**9) > some


def test_budget_that_cannot_be_met() -> None:
    """The gradient of two of the parameters is the output's own, three floats."""
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(SplitError, match="least possible is 12 bytes for one microbatch") as caught:
        split(PlainParameters(), (x,), memory=11)
    assert "memory=11 needs one graph" in caught.value.__notes__[0]
    assert split(PlainParameters(), (x,), memory=12).functions


def _deferred_bytes(model: nn.Module, x: torch.Tensor, memory: str | int) -> int:
    stage = Stage(model, [x], memory=memory)
    (y,) = stage.forward(0, [x.detach().clone()])
    stage.backward_input(0, [torch.ones_like(y)])
    return stage.deferred_bytes
