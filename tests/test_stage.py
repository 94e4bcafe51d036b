"""Stage: the functional face, against plain autograd and for what it holds."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Counter, PlainParameters, SwiGLU

from autosplit import CaptureError, SplitError, Stage

# Stages hand tensors to each other: one tensor in, one tensor out.
NAMES = [name for name in CASES if name != "several"]


def reference(model: nn.Module, batches: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    found = []
    for batch, grad in zip(batches, grads, strict=True):
        leaf = batch.clone()
        if leaf.is_floating_point():
            leaf.requires_grad_()
        model(leaf).backward(grad)
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_autograd(name: str, fused: bool) -> None:
    case = CASES[name]
    model = case.build()
    twin = copy.deepcopy(model)
    batches = [case.batch() for _ in range(3)]
    example = batches[0].clone()
    stage = Stage(model, [example.requires_grad_(example.is_floating_point())])
    ((shape, dtype, differentiable),) = stage.output_specs
    assert differentiable
    grads = [torch.randn(shape).to(dtype) for _ in batches]
    outputs = [stage.forward(m, [batch.clone()]) for m, batch in enumerate(batches)]
    assert [output[0].shape for output in outputs] == [shape] * 3
    if fused:
        found = [stage.backward(m, [grad])[0] for m, grad in enumerate(grads)]
    else:
        found = [stage.backward_input(m, [grad])[0] for m, grad in enumerate(grads)]
        assert stage.gradients == {}
        for microbatch in range(3):
            stage.backward_weight(microbatch)
    expected = reference(twin, batches, grads)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
    stage.publish()
    for (key, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), key


@pytest.mark.parametrize("name", ["transformer", "tied", "repeated", "convolutions", "bfloat16"])
def test_fused_accumulation_agrees_but_for_rounding(name: str) -> None:
    case = CASES[name]
    model = case.build()
    batches = [case.batch() for _ in range(3)]
    example = batches[0].clone().requires_grad_(batches[0].is_floating_point())
    stage = Stage(model, [example], accumulation="fused")
    ((shape, dtype, _),) = stage.output_specs
    grads = [torch.randn(shape).to(dtype) for _ in batches]
    reference(model, batches, grads)
    run_microbatches(stage, batches, grads)
    split = dict(stage.gradients)
    stage.reset()
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(m, [batch.clone()])
        stage.backward(m, [grad.clone()])
    for key, parameter in model.named_parameters():
        expected = parameter.grad.double()
        allowed = 10 * torch.finfo(dtype).eps * expected.norm()
        for mine in (split[key], stage.gradients[key]):
            assert (mine.double() - expected).norm() <= allowed, key


def test_unknown_accumulation() -> None:
    with pytest.raises(
        SplitError, match="unknown accumulation 'sum'; known ones: 'exact', 'fused'"
    ):
        Stage(nn.Linear(3, 2), [torch.randn(4, 3)], accumulation="sum")


def run_microbatches(stage: Stage, batches: list[Tensor], grads: list[Tensor]) -> None:
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [grad.clone()])
        stage.backward_weight(m)


@pytest.mark.parametrize("accumulation", ["exact", "fused"])
def test_float32_sums_of_bfloat16_gradients_are_closer(accumulation: str) -> None:
    """To the sum in float64, over 64 microbatches, before and after the rounding at the end."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)).bfloat16()
    twin = copy.deepcopy(model).double()
    batches = [torch.randn(5, 8).bfloat16() for _ in range(64)]
    grads = [torch.randn(5, 4).bfloat16() for _ in range(64)]
    for batch, grad in zip(batches, grads, strict=True):
        twin(batch.double()).backward(grad.double())
    errors = {}
    for dtype in (None, torch.float32):
        stage = Stage(model, [batches[0]], accumulation=accumulation, grad_dtype=dtype)
        run_microbatches(stage, batches, grads)
        assert {g.dtype for g in stage.gradients.values()} == {dtype or torch.bfloat16}
        model.zero_grad()
        stage.publish()
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
        errors[dtype] = [
            (mine.grad.double() - theirs.grad).norm().item()
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True)
        ]
    for float32, bfloat16 in zip(errors[torch.float32], errors[None], strict=True):
        assert 2 * float32 < bfloat16


def test_publish_keeps_float32_where_the_parameter_takes_it() -> None:
    model = nn.Linear(3, 2).bfloat16()
    model.weight.grad_dtype = torch.float32
    stage = Stage(model, [torch.randn(4, 3).bfloat16()], grad_dtype=torch.float32)
    run_microbatches(
        stage,
        [torch.randn(4, 3).bfloat16() for _ in range(2)],
        [torch.randn(4, 2).bfloat16() for _ in range(2)],
    )
    total = stage.gradients["weight"]
    stage.publish()
    assert model.weight.grad is total
    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (torch.float32, torch.bfloat16)


def test_grad_dtype_that_cannot_hold_a_gradient() -> None:
    with pytest.raises(SplitError, match="grad_dtype must be a floating-point dtype, got tor"):
        Stage(nn.Linear(3, 2), [torch.randn(4, 3)], grad_dtype=torch.int64)


def test_parameter_replaced_between_two_microbatches() -> None:
    model = nn.Linear(3, 2)
    stage = Stage(model, [torch.randn(4, 3)], index=2)
    stage.forward(0, [torch.randn(4, 3)])
    stage.backward(0, [torch.randn(4, 2)])
    model.weight = nn.Parameter(torch.randn(2, 3))
    stage.forward(1, [torch.randn(4, 3)])
    with pytest.raises(SplitError, match="stage 2: parameter weight was replaced between two"):
        stage.backward(1, [torch.randn(4, 2)])


def test_gradient_that_holds_more_than_itself_is_copied() -> None:
    """It is a slice of the output's gradient times two, which must not stay alive with it."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.part, x]) * 2.0

    stage = Stage(Sliced(), [torch.randn(1000)])
    run_microbatches(stage, [torch.randn(1000)], [torch.ones(1002)])
    gradient = stage.gradients["part"]
    assert gradient.tolist() == [2.0, 2.0]
    assert gradient.untyped_storage().nbytes() == 8


def test_lists_are_handed_over() -> None:
    stage = Stage(nn.Linear(3, 2), [torch.randn(4, 3, requires_grad=True)])
    inputs: list[Tensor] = [torch.randn(4, 3)]
    grads: list[Tensor | None] = [torch.randn(4, 2)]
    stage.forward(0, inputs)
    stage.backward_input(0, grads)
    assert inputs == []
    assert grads == []


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_saved_tensors_die_at_their_last_use(fused: bool) -> None:
    """When I (or B) is done, everything saved that W does not need is gone; when W is done,
    everything.
    """
    stage = Stage(SwiGLU(), [torch.randn(2, 4, 16, requires_grad=True)])
    stage.forward(0, [torch.randn(2, 4, 16)])
    saved = [weakref.ref(tensor) for tensor in stage._saved.tensors]
    if fused:
        stage.backward(0, [torch.randn(2, 4, 16)])
        assert [ref for ref in saved if ref() is not None] == []
        return
    stage.backward_input(0, [torch.randn(2, 4, 16)])
    deferred = [weakref.ref(tensor) for tensor in stage._weights.flights.tensors]
    alive = [ref for ref in saved if ref() is not None]
    assert set(alive) <= set(deferred)
    assert 0 < len(alive) < len(saved)
    stage.backward_weight(0)
    # A norm's weight gradient was made by I and is now in ``gradients``; nothing else is left.
    gradients = {grad.untyped_storage().data_ptr() for grad in stage.gradients.values()}
    left = [tensor for ref in deferred if (tensor := ref()) is not None]
    assert all(tensor.untyped_storage().data_ptr() in gradients for tensor in left)
    assert len(left) <= 1 < len(deferred)


def test_output_gradient_dies_inside_the_backward() -> None:
    """The caller's list was its only owner, so the peak does not include it."""
    stage = Stage(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), [torch.randn(4, 3)])
    stage.forward(0, [torch.randn(4, 3)])
    grads: list[Tensor | None] = [torch.randn(4, 2)]
    died = weakref.ref(grads[0])
    stage.backward(0, grads)
    assert died() is None


def test_bytes_held() -> None:
    stage = Stage(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        [torch.randn(32, 8, requires_grad=True)],
    )
    stage.forward(0, [torch.randn(32, 8)])
    assert stage.saved_bytes == 4 * 32 * (8 + 16)
    stage.backward_input(0, [torch.randn(32, 4)])
    assert (stage.saved_bytes, stage.deferred_bytes) == (0, 4 * 32 * (8 + 16 + 16 + 4))
    stage.backward_weight(0)
    assert stage.deferred_bytes == 0


def test_buffer_updates_land_in_forward_order() -> None:
    stage = Stage(Counter(), [torch.randn(5, 4)])
    for microbatch in range(3):
        stage.forward(microbatch, [torch.randn(5, 4)])
    assert stage.module.scale.tolist() == [8.0] * 4


def test_gradients_that_share_a_tensor_are_accumulated_apart() -> None:
    stage = Stage(PlainParameters(), [torch.randn(3, requires_grad=True)])
    for microbatch in range(2):
        stage.forward(microbatch, [torch.randn(3)])
        grads: list[Tensor | None] = [torch.ones(3)]
        (input_grad,) = stage.backward_input(microbatch, grads)
        stage.backward_weight(microbatch)
        assert input_grad is not None
        assert input_grad.tolist() == [1.0] * 3
    assert {name: grad.tolist() for name, grad in stage.gradients.items()} == {
        "a": [2.0] * 3,
        "b": [2.0] * 3,
    }


def test_publish_adds_to_what_is_there() -> None:
    stage = Stage(nn.Linear(2, 1, bias=False), [torch.ones(1, 2)])
    for _ in range(2):
        stage.forward(0, [torch.ones(1, 2)])
        stage.backward(0, [torch.ones(1, 1)])
        stage.publish()
    assert stage.module.weight.grad.tolist() == [[2.0, 2.0]]
    assert stage.gradients == {}


def test_wrong_order() -> None:
    stage = Stage(nn.Linear(3, 2), [torch.randn(4, 3)])
    with pytest.raises(SplitError, match="stage 0: microbatch 5 has not run forward"):
        stage.backward_input(5, [torch.randn(4, 2)])
    with pytest.raises(SplitError, match="microbatch 0 has not run backward_input"):
        stage.backward_weight(0)
    stage.forward(0, [torch.randn(4, 3)])
    with pytest.raises(SplitError, match="microbatch 0 has run its forward"):
        stage.forward(0, [torch.randn(4, 3)])
    stage.backward_input(0, [torch.randn(4, 2)])
    with pytest.raises(SplitError, match="microbatch 0 are pending; call backward_weight"):
        stage.publish()


def test_misfitting_gradient() -> None:
    stage = Stage(nn.Linear(3, 2), [torch.randn(4, 3)])
    stage.forward(0, [torch.randn(4, 3)])
    with pytest.raises(
        SplitError,
        match=r"gradient of output must be torch.float32 \[4, 2\], got "
        r"torch.float32 \[2, 2\]",
    ):
        stage.backward_input(0, [torch.randn(2, 2)])


def test_output_that_is_no_tensor() -> None:
    with pytest.raises(CaptureError, match=r"stage 3 \(Several\) returns output\['none'\]"):
        Stage(CASES["several"].build(), [torch.randn(3, 4)], index=3)


@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("name", ["transformer", "tied", "repeated", "convolutions", "embedding"])
def test_slices_equal_autograd(name: str, slices: int) -> None:
    """Slices of two microbatches in turns, and a third microbatch's W whole."""
    if name == "embedding":  # nothing for I: one chain of everything
        model: nn.Module = nn.Sequential(nn.Embedding(11, 16), SwiGLU(), nn.LayerNorm(16))
        batches = [torch.randint(0, 11, (2, 4)) for _ in range(3)]
    else:
        model, batches = CASES[name].build(), [CASES[name].batch() for _ in range(3)]
    twin = copy.deepcopy(model)
    example = batches[0].clone().requires_grad_(batches[0].is_floating_point())
    stage = Stage(model, [example], slices=slices)
    assert sorted(n for part in stage.slices for n in part) == sorted(
        stage.functions.parameter_names
    )
    ((shape, _, _),) = stage.output_specs
    grads = [torch.randn(shape) for _ in batches]
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [grad.clone()])
    for index in range(slices):
        stage.backward_weight(0, slice=index)
        stage.backward_weight(1, slice=index)
    stage.backward_weight(2)
    stage.publish()
    reference(twin, batches, grads)
    for (key, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), key


def test_slices_free_what_they_read_last() -> None:
    stage = Stage(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        [torch.randn(32, 8, requires_grad=True)],
        slices=2,
    )
    stage.forward(0, [torch.randn(32, 8)])
    stage.backward_input(0, [torch.randn(32, 4)])
    deferred = [weakref.ref(tensor) for tensor in stage._weights.flights.tensors]
    assert stage.deferred_bytes == 4 * 32 * (8 + 16 + 16 + 4)
    assert stage.slices == (("2.weight", "2.bias"), ("0.weight", "0.bias"))
    stage.backward_weight(0, slice=0)
    assert stage.deferred_bytes == 4 * 32 * (8 + 16)
    assert sum(ref() is None for ref in deferred) == 2
    stage.backward_weight(0, slice=1)
    assert stage.deferred_bytes == 0
    assert all(ref() is None for ref in deferred)


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
    with pytest.raises(SplitError, match="written in place between the forward and its backward"):
        stage.backward_weight(0, slice=1)


@pytest.mark.parametrize("name", ["tied", "convolutions", "bfloat16"])
def test_concatenated_microbatches_agree_but_for_rounding(name: str) -> None:
    case = CASES[name]
    model = case.build()
    batches = [case.batch() for _ in range(5)]
    example = batches[0].clone().requires_grad_(batches[0].is_floating_point())
    stage = Stage(model, [example], accumulation="concatenated")
    ((shape, dtype, _),) = stage.output_specs
    grads = [torch.randn(shape).to(dtype) for _ in batches]
    reference(model, batches, grads)
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [grad.clone()])
    stage.backward_weight([0, 1])
    stage.backward_weight([3, 2])
    stage.backward_weight([4])
    assert stage.deferred_bytes == 0
    for key, parameter in model.named_parameters():
        expected = parameter.grad.double()
        allowed = 10 * torch.finfo(dtype).eps * (1 + expected.norm())
        assert (stage.gradients[key].double() - expected).norm() <= allowed, key


def test_several_microbatches_are_exact_unless_asked_otherwise() -> None:
    model = CASES["transformer"].build()
    twin = copy.deepcopy(model)
    batches = [torch.randn(2, 8, 16) for _ in range(3)]
    grads = [torch.randn(2, 8, 16) for _ in range(3)]
    stage = Stage(model, [torch.randn(2, 8, 16, requires_grad=True)])
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [grad.clone()])
    stage.backward_weight([0, 1, 2])
    stage.publish()
    reference(twin, batches, grads)
    for (key, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), key


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
