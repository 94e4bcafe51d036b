"""Models with graph breaks: what one microbatch is, and what it holds."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
from torch import Tensor, nn

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.dynamo.partial_model import Partial
from tests.dynamo.breaking import (
    Nested,
    Tied,
    TwoLayers,
    Unbreakable,
    loss_of,
)
from tests.dynamo.comparing import assert_same_state, train
from tests.pending import deferred_tensors


def test_hooks_fire_once_a_microbatch_with_the_sum_over_graphs() -> None:
    model = Tied()
    reference = copy.deepcopy(model)
    seen: dict[str, list[Tensor]] = {"mine": [], "theirs": []}
    model.a.weight.register_hook(seen["mine"].append)
    reference.a.weight.register_hook(seen["theirs"].append)
    steps: list[int] = []
    model.a.weight.register_post_accumulate_grad_hook(lambda _: steps.append(partial.pending))
    partial = Partial(model)
    batches = [torch.randn(3, 4) for _ in range(2)]
    train(partial, batches)
    train(reference, batches)
    assert steps == [0, 0]
    for mine, theirs in zip(seen["mine"], seen["theirs"], strict=True):
        assert torch.equal(mine, theirs)


def test_microbatches_are_forward_calls_oldest_backward_first() -> None:
    partial = Partial(Scaled())
    weight = dict(partial.named_parameters())["weight"]
    for count, total in ((1, 2.0), (2, 22.0), (3, 222.0)):
        for value in (1.0, 10.0, 100.0):
            partial(torch.full((1,), value)).sum().backward()
        assert partial.pending == 3
        partial.backward_weight(count)
        assert partial.pending == 3 - count
        partial.discard()
        assert weight.grad.tolist() == [total]
        weight.grad = None
    (partial(torch.ones(1)) + partial(torch.ones(1))).sum().backward()
    assert partial.pending == 2  # as for SplitModule: one backward through two calls


class Scaled(nn.Module):
    """Two graphs, each with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        torch._dynamo.graph_break()
        return h * self.weight


def test_model_without_any_graph_has_nothing_pending() -> None:
    model = Unbreakable()
    partial = Partial(model)
    partial(torch.randn(3, 4)).sum().backward()
    assert partial.parts == ()
    assert partial.pending == partial.pending_bytes == 0
    assert model.a.weight.grad is not None
    partial.backward_weight()
    assert partial.pending == 0


def test_pending_bytes_are_distinct_storage() -> None:
    partial = Partial(TwoLayers(8))
    assert partial.pending_bytes == 0
    partial(torch.randn(32, 8, requires_grad=True)).square().sum().backward()
    # Each of two graphs defers its X and its dY, [32, 8] float32; the ReLU is both one
    # graph's output and the other's X.
    assert partial.pending_bytes == 4 * 32 * 8 * 4
    partial.backward_weight()
    assert partial.pending_bytes == 0


def test_unused_output_leaves_its_parameters_without_gradient() -> None:
    """AOTAutograd alone would give zeros, which an optimizer with momentum takes for a step."""
    model = Nested()
    partial = Partial(model)
    for _ in range(2):
        loss_of(partial(torch.randn(3, 4))).backward()
    partial.backward_weight()
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None


def test_second_backward_through_one_output() -> None:
    model = TwoLayers()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    x = torch.randn(3, 4)
    for forward in (partial, reference):
        loss = forward(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    partial.backward_weight()
    assert_same_state(model, reference)


def test_gradients_of_inputs_only_defer_nothing() -> None:
    model = TwoLayers()
    partial = Partial(model)
    x = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(partial(x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(model(x).sum(), x)[0])
    partial(x).sum().backward(inputs=[x])
    assert partial.pending_bytes == 0
    partial.backward_weight()
    assert model.a.weight.grad is None


@collecting_new_objects_only()
def test_microbatch_dies_with_its_weight_gradients() -> None:
    partial = Partial(TwoLayers())
    x = torch.randn(3, 4)
    output = partial(x)
    output.square().sum().backward()
    died = weakref.ref(output)
    del output
    gc.collect()
    assert died() is None
    refs = [weakref.ref(tensor) for tensor in deferred_tensors(partial) if tensor is not x]
    assert len(refs) >= 3
    partial.backward_weight()
    assert [ref() for ref in refs if ref() is not None] == []
