"""Stages call blocks, and blocks add to sums themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import Stage
from autosplit.passes.graph import SUBGRAPH, calls
from tests.capture.regions.blocks import WIDTH, Plain, Stack, kinds
from tests.microbatches import reference
from tests.zoo import llama

BATCH = torch.randn(2, 3, WIDTH)
INDUCTOR: dict[str, Any] = {"backend": "inductor"}


def step(stage: Stage, batches: list[Tensor], grads: list[Tensor], whole: bool) -> None:
    for microbatch, batch in enumerate(batches):
        stage.forward(microbatch, [batch.clone()])
        if whole:
            stage.backward(microbatch, [grads[microbatch]])
        else:
            stage.backward_input(microbatch, [grads[microbatch]])
            stage.backward_weight(microbatch)
    stage.publish()


@pytest.mark.parametrize("whole", [False, True], ids=["I and W", "B"])
def test_gradients_add_up(whole: bool) -> None:
    batches = [torch.randn(2, 3, WIDTH) for _ in range(3)]
    grads = [torch.randn(2, 3, 3) for _ in batches]
    model = Stack()
    twin = copy.deepcopy(model)
    stage = Stage(model, [batches[0].clone().requires_grad_()])
    assert len(stage.functions.capture.guards.blocks) == 3
    step(stage, batches, grads, whole)
    reference(twin, batches, grads)
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    assert not [name for (name, mine), other in pairs if not torch.equal(mine.grad, other.grad)]


def test_the_source_of_a_call_has_the_operators_of_blocks() -> None:
    stage = Stage(Stack(), [torch.randn(2, 3, WIDTH)])
    for call in ("forward", "backward_input", "backward_weight", "backward"):
        graph = stage.source(call, adds=call.startswith("backward")).graph
        assert not [node for node in calls(graph) if SUBGRAPH in node.meta]


def compiled(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[int, Stage]:
    """How many graphs Inductor compiles for a step of a model with so many blocks."""
    from autosplit.torch_internals import inductor  # which takes seconds to import

    compiled: list[object] = []
    original = inductor.compile_module
    stage = Stage(Stack(Plain, count), [BATCH.requires_grad_()], **INDUCTOR)
    with monkeypatch.context() as patched:
        patched.setattr(
            inductor, "compile_module", lambda *a, **k: compiled.append(a) or original(*a, **k)
        )
        step(stage, [BATCH.detach()] * 2, [torch.ones(2, 3, 3)] * 2, whole=False)
    return len(compiled), stage


def test_inductor_compiles_each_kind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, stage = compiled(monkeypatch, 2)
    many, _ = compiled(monkeypatch, 3)
    assert many == few
    assert_gradients_of_two(stage.module)


def assert_gradients_of_two(model: nn.Module) -> None:
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    (2 * model(BATCH)).sum().backward()
    exact = [parameter.grad for parameter in model.parameters()]
    rounding = 1e-5 * max(one.abs().max().item() for one in exact)  # small ones are of large terms
    assert all(torch.allclose(*pair, atol=rounding) for pair in zip(mine, exact, strict=True))


def test_decomposed_results_may_lie_otherwise() -> None:
    """Keys lie otherwise than AOTAutograd has asked of their gradients, once they are decomposed
    for Inductor.
    """
    model = llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, use_cache=True)
    ids = torch.randint(20, (2, 8))
    split = autosplit.split(model, backend="inductor")
    split.capture(input_ids=ids, labels=ids)
    assert kinds(split) == [2]
