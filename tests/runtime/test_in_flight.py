"""W in slices, and of several microbatches in one call."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from autosplit import SplitError, Stage
from tests.microbatches import Twins, reference
from tests.zoo import SwiGLU


@pytest.mark.parametrize(
    ("name", "slices"),
    [("transformer", 3), ("tied", 2), ("repeated", 2), ("convolutions", 3), ("embedding", 4)],
)
def test_slices_equal_autograd(name: str, slices: int) -> None:
    """Slices of two microbatches in turns, and a third microbatch's W whole."""
    late = name == "embedding"  # nothing for I: one chain of everything
    if late:
        model = nn.Sequential(nn.Embedding(11, 16), SwiGLU(), nn.LayerNorm(16))
        batches = [torch.randint(0, 11, (2, 4)) for _ in range(3)]
        twins = Twins(model, batches, slices=slices, late_input=True)
    else:
        twins = Twins(name, slices=slices)
    stage = twins.stage
    names = [name for part in stage.slices for name in part]
    assert sorted(names) == sorted(stage.functions.parameter_names)
    twins.forward()
    twins.backward()
    for index in range(slices):
        stage.backward_weight(0, slice=index)
        stage.backward_weight(1, slice=index)
    stage.backward_weight(2)
    twins.assert_alike()


def test_slices_free_what_they_read_last() -> None:
    stage = Stage(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        [torch.randn(32, 8, requires_grad=True)],
        slices=2,
    )
    stage.forward(0, [torch.randn(32, 8)])
    stage.backward_input(0, [torch.randn(32, 4)])
    deferred = [weakref.ref(tensor) for tensor in stage._weights.in_flight.tensors]
    assert stage.deferred_bytes == 4 * 32 * (8 + 16 + 16 + 4)
    assert stage.slices == (("2.weight", "2.bias"), ("0.weight", "0.bias"))
    stage.backward_weight(0, slice=0)
    assert stage.deferred_bytes == 4 * 32 * (8 + 16)
    assert sum(ref() is None for ref in deferred) == 2
    stage.backward_weight(0, slice=1)
    assert stage.deferred_bytes == 0
    assert all(ref() is None for ref in deferred)


def test_gradients_of_a_slice_are_published_before_the_next_has_run() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    stage = Stage(model, [torch.randn(4, 3, requires_grad=True)], slices=2)
    batches, grads = torch.randn(2, 4, 3), torch.randn(2, 4, 2)
    for m in range(2):
        stage.forward(m, [batches[m].clone()])
        stage.backward_input(m, [grads[m].clone()])
    first, second = stage.slices
    stage.backward_weight(0, slice=0)
    with pytest.raises(SplitError, match="weight gradients of microbatch 1 are pending"):
        stage.publish(first)
    stage.backward_weight(1, slice=0)
    stage.publish(first)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, grad in found.items() if grad is not None} == {*first}
    with pytest.raises(SplitError, match="weight gradients of microbatch 0, 1 are pending"):
        stage.publish(second)
    for m in range(2):
        stage.backward_weight(m, slice=1)
    stage.publish()
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    for m in range(2):
        twin(batches[m]).backward(grads[m])
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)


def test_slices_out_of_turn() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    stage = Stage(model, [torch.randn(4, 3, requires_grad=True)], slices=2)
    stage.forward(0, [torch.randn(4, 3)])
    stage.backward_input(0, [torch.randn(4, 2)])
    turn = "stage 0: W of microbatch 0 runs in 2 slice.*it is the turn of slice"
    with pytest.raises(SplitError, match=f"{turn} 0, got 1"):
        stage.backward_weight(0, slice=1)
    stage.backward_weight(0, slice=0)
    for wrong in (0, 2, -1):
        with pytest.raises(SplitError, match=f"{turn} 1, got {wrong}"):
            stage.backward_weight(0, slice=wrong)
    with pytest.raises(SplitError, match="1 of 2 slices of W of microbatch 0 have run"):
        stage.backward_weight(0)
    with pytest.raises(SplitError, match="microbatch 0 are pending"):
        stage.publish()
    stage.backward_weight(0, slice=1)
    with pytest.raises(SplitError, match="microbatch 0 has not run backward_input"):
        stage.backward_weight(0, slice=0)


def test_more_slices_than_products() -> None:
    with pytest.raises(SplitError, match="1 matrix products and convolutions and cannot be cut in"):
        Stage(nn.Linear(3, 2), [torch.randn(4, 3, requires_grad=True)], slices=2)


def test_deferred_tensor_written_between_two_slices() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    stage = Stage(model, [torch.randn(4, 3, requires_grad=True)], slices=2)
    x = torch.randn(4, 3)
    stage.forward(0, [x])
    stage.backward_input(0, [torch.randn(4, 2)])
    stage.backward_weight(0, slice=0)
    x.add_(1.0)
    with pytest.raises(SplitError, match=r"in place between backward\(\) and backward_weight"):
        stage.backward_weight(0, slice=1)


@pytest.mark.parametrize("name", ["tied", "convolutions", "bfloat16"])
def test_concatenated_microbatches_agree_but_for_rounding(name: str) -> None:
    twins = Twins(name, 5, accumulation="concatenated")
    twins.forward()
    twins.backward()
    for several in ([0, 1], [3, 2], [4]):
        twins.stage.backward_weight(several)
    assert twins.stage.deferred_bytes == 0
    twins.assert_rounded()


def test_microbatches_of_two_graphs_are_not_concatenated() -> None:
    """The model changed in between: each graph's own microbatches go together."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 2))
    stage = Stage(model, [torch.randn(4, 3, requires_grad=True)], accumulation="concatenated")
    batches = [torch.randn(4, 3) for _ in range(4)]
    for m, batch in enumerate(batches):
        model.train(m < 2)
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [torch.ones(4, 2)])
    stage.backward_weight([0, 1, 2, 3])
    stage.publish()
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    reference(model, batches, [torch.ones(4, 2)] * 4)
    for gradient, parameter in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_several_microbatches_asked_for_wrongly() -> None:
    stage = Stage(nn.Linear(3, 2), [torch.randn(4, 3)], accumulation="concatenated")
    for m in range(2):
        stage.forward(m, [torch.randn(4, 3)])
        stage.backward_input(m, [torch.randn(4, 2)])
    with pytest.raises(SplitError, match="stage 0: W of microbatch 1 is asked for twice"):
        stage.backward_weight([1, 0, 1])
    with pytest.raises(SplitError, match="stage 0: slice=0 of several microbatches"):
        stage.backward_weight([0, 1], slice=0)
    with pytest.raises(SplitError, match="microbatch 7 has not run backward_input"):
        stage.backward_weight([0, 7])
    stage.backward_weight([0, 1])
