"""Stage: the functional face, against plain autograd and for what it holds."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from autosplit import CaptureError, SplitError, Stage, split
from autosplit.passes.graph import calls
from autosplit.pipeline.ledger.prediction import footprint
from tests.gradients import assert_same_gradients
from tests.microbatches import Twins, reference
from tests.zoo import CASES, Made, SwiGLU, layered

# Stages hand tensors to each other: one tensor in, one tensor out.
NAMES = ["transformer", "convolutions", "tied", "counter", "in_place", "frozen", "bfloat16"]


@pytest.mark.parametrize("name", NAMES)
def test_equals_autograd(name: str) -> None:
    """By I and W, then by B."""
    twins = Twins(name)
    for whole in (False, True):
        outputs = twins.forward()
        assert [output.shape for output in outputs] == [grad.shape for grad in twins.grads]
        twins.backward(whole=whole)
        if not whole:
            assert twins.stage.gradients == {}
            twins.weights()
        twins.assert_alike()
        for network in (twins.model, twins.twin):
            network.zero_grad()


@pytest.mark.parametrize("whole", [False, True])
def test_hooks_of_parameters_see_each_microbatch(whole: bool) -> None:
    """A clamp of the sum would be another thing than the sum of what was clamped."""
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batches = [torch.randn(8, 3) for _ in range(3)]
    twins = Twins(model, batches)
    for network in (model, twins.twin):
        for name in ("0.weight", "1.weight", "3.bias"):
            network.get_parameter(name).register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    twins.forward()
    twins.backward(whole=whole)
    if not whole:
        twins.weights()
    twins.assert_alike()


def test_a_hook_that_waits_for_a_gradient_is_called_when_it_is_published() -> None:
    model, seen = nn.Linear(3, 2), []
    model.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    node = get_gradient_edge(model.bias).node
    node.register_hook(lambda _, grads: seen.append(grads[0].clone()))
    stage = Stage(model, [torch.randn(4, 3)])
    for microbatch in range(2):
        stage.forward(microbatch, [torch.randn(4, 3)])
        stage.backward(microbatch, [torch.ones(4, 2)])
    assert not seen
    stage.publish()
    assert [tensor.tolist() for tensor in seen] == [[8, 8]] * 2
    node.register_prehook(lambda grads: (grads[0] / 2,))
    stage.forward(0, [torch.randn(4, 3)])
    stage.backward(0, [torch.ones(4, 2)])
    stage.publish()
    assert [tensor.tolist() for tensor in seen[2:]] == [[6, 6]] * 2


def test_a_module_may_write_into_what_an_earlier_stage_computed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2), nn.ReLU(inplace=True))
    batches, grads = [torch.randn(4, 3) for _ in range(2)], [torch.randn(4, 2) for _ in range(2)]
    blank = batches[0].clone().requires_grad_()
    blank.untyped_storage().resize_(0)  # an example's values mean nothing
    stage = Stage(copy.deepcopy(model), [blank])
    stage.module.eval()  # traces once more
    for m, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        leaf = batch.clone().requires_grad_()
        expected = model(leaf.clone())
        expected.backward(grad)
        assert torch.equal(stage.forward(m, [batch.clone()])[0], expected)
        assert torch.equal(stage.backward_input(m, [grad.clone()])[0], leaf.grad)
        stage.backward_weight(m)
    for name, parameter in model.named_parameters():
        assert torch.equal(stage.gradients[name], parameter.grad)


def test_a_change_that_reaches_the_outputs_is_refused() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    stage = Stage(model, [torch.randn(4, 3)])
    model.requires_grad_()
    for _ in range(2):  # the second call traces again
        with pytest.raises(SplitError) as caught:
            stage.forward(0, [torch.randn(4, 3)])
        assert (
            "stage 0 (Linear) returned float32[4, 2] without gradient when it was set up, and "
            "would now return float32[4, 2]: something that its forward reads was changed"
        ) in str(caught.value)
    model.requires_grad_(False)
    assert len(stage.forward(0, [torch.randn(4, 3)])) == 1


def test_an_output_that_is_detached_at_some_sizes_is_not_the_first() -> None:
    """The error says so, and how to begin instead."""
    model = Made(lambda m, x: x * 2 if len(x) < 4 else x.detach() * 2)
    short, long = (torch.randn(size, 3, requires_grad=True) for size in (2, 5))
    stage = Stage(model, [long])
    with pytest.raises(SplitError, match="let the first inputs have a size at which it detaches"):
        stage.forward(0, [short])
    stage = Stage(model, [short])
    for microbatch, (x, expected) in enumerate([(long, 0.0), (short, 2.0)]):
        stage.forward(microbatch, [x])
        (grad,) = stage.backward(microbatch, [torch.ones_like(x)])
        assert grad is None or grad.unique().tolist() == [expected]


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
    deferred = [weakref.ref(tensor) for tensor in stage.deferred_tensors]
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


def test_w_is_the_whole_backward_if_i_is_deferred() -> None:
    """I runs nothing: it hands over what F saved and the gradient of the output, as they are."""
    model = SwiGLU()
    twin = copy.deepcopy(model)
    batches = [torch.randn(2, 4, 16) for _ in range(4)]
    grads: list[Tensor] = [torch.randn(2, 4, 16) for _ in batches]
    stage = Stage(model, [batches[0]], defer_whole_backward=True)
    for microbatch, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        stage.forward(microbatch, [batch.clone()])
        if microbatch % 2:
            assert stage.backward(microbatch, [grad]) == [None]
            continue
        saved = [*stage._saved.tensors]
        assert stage.backward_input(microbatch, [grad]) == [None]
        assert set(map(id, stage.deferred_tensors)) == {*map(id, saved), id(grad)}
        assert stage.deferred_bytes == footprint(stage)[1]
        stage.backward_weight(microbatch)
    stage.publish()
    reference(twin, batches, grads)
    assert_same_gradients(model, twin)


def test_lean_memory_computes_weight_gradients_in_i_of_a_first_stage() -> None:
    """There I has something to compute, and W is not the whole backward."""
    stage = Stage(SwiGLU(), [torch.randn(2, 4, 16)], memory="lean", defer_whole_backward=True)
    stage.forward(0, [torch.randn(2, 4, 16)])
    assert stage.backward_input(0, [torch.randn(2, 4, 16)]) == [None]
    early = set(stage.gradients)
    assert early == set(stage.functions.early_parameters) != set()
    stage.backward_weight(0)
    assert set(stage.gradients) == {name for name, _ in stage.module.named_parameters()}


def test_without_input_gradients_i_is_the_chain() -> None:
    """I ends at the first product; W keeps no more than X and dY of the products."""
    stage = Stage(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), [torch.randn(32, 8)]
    )
    stage.forward(0, [torch.randn(32, 8)])
    assert stage.backward_input(0, [torch.randn(32, 4)]) == [None]
    assert stage.deferred_bytes == 4 * 32 * (8 + 16 + 16 + 4)
    stage.backward_weight(0)
    assert set(stage.gradients) == {name for name, _ in stage.module.named_parameters()}


@pytest.mark.parametrize(
    "kind", [nn.Embedding, nn.EmbeddingBag, functools.partial(nn.EmbeddingBag, mode="sum")]
)
@pytest.mark.parametrize("padding", [None, 3])
def test_sparse_embedding_gradients(kind: Callable[..., nn.Module], padding: int | None) -> None:
    model = nn.Sequential(kind(10, 4, sparse=True, padding_idx=padding), nn.Linear(4, 4))
    indices = [*torch.randint(10, (2, 3, 5)), torch.full((3, 5), 3)]
    grads = [torch.randn(model(index).shape) for index in indices]
    plain = copy.deepcopy(model)
    stage = Stage(model, [indices[0]])
    for microbatch, (item, grad) in enumerate(zip(indices, grads, strict=True)):
        stage.forward(microbatch, [item])
        stage.backward_input(microbatch, [grad])
        plain(item).backward(grad)
    for microbatch in range(len(indices)):
        stage.backward_weight(microbatch)
    stage.publish()
    mine, theirs = model[0].weight.grad, plain[0].weight.grad
    assert mine.is_sparse
    assert theirs.is_sparse
    torch.testing.assert_close(mine.to_dense(), theirs.to_dense())


def test_compiled_graphs_do_not_add_to_sparse_gradients() -> None:
    """Inductor has no addition of sparse tensors."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    for backend, inside in (("inductor", False), ("eager", True)):
        stage = Stage(copy.deepcopy(model), [torch.arange(6)], backend=backend)
        graph = stage.source("backward_weight", adds=True).graph
        targets = {node.target for node in calls(graph)}
        assert (torch.ops.aten.add_.Tensor in targets) == inside


def test_publish_adds_to_what_is_there() -> None:
    stage = Stage(nn.Linear(2, 1, bias=False), [torch.ones(1, 2)])
    for _ in range(2):
        stage.forward(0, [torch.ones(1, 2)])
        stage.backward(0, [torch.ones(1, 1)])
        stage.publish()
    assert stage.module.weight.grad.tolist() == [[2.0, 2.0]]
    assert stage.gradients == {}


def test_modules_that_are_split_or_compiled_are_refused() -> None:
    example = (torch.randn(2, 8, requires_grad=True),)
    model = nn.Linear(8, 8)
    for module, message in (
        (split(model), "the module is split already; pass its .unsplit, the unsplit module"),
        (nn.Sequential(nn.GELU(), split(model)), "its submodule '1' is split already"),
        (torch.compile(model), "is compiled by torch.compile.*Pass the module itself"),
    ):
        with pytest.raises(SplitError, match=f"stage 3: .*{message}"):
            Stage(module, example, index=3)


def test_a_dtype_of_gradients_that_is_none_is_refused() -> None:
    with pytest.raises(
        SplitError, match=r"must be a floating-point dtype such as torch\.float32, got 'fp32'"
    ):
        Stage(nn.Linear(8, 8), (torch.randn(2, 8),), grad_dtype="fp32")  # type: ignore[arg-type]


def test_wrong_order() -> None:
    stage = Stage(nn.Linear(3, 2), torch.randn(4, 3))
    with pytest.raises(SplitError, match=r"stage 0: .* a list .*, such as \[x\]; got a tuple"):
        stage.forward(0, (torch.randn(4, 3),))  # type: ignore[arg-type]
    with pytest.raises(SplitError, match="cannot be copied or pickled: make a Stage of a copy"):
        copy.deepcopy(stage)
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


def test_microbatches_of_any_size() -> None:
    """All in flight at once; the second size is the last that is captured for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
    plain = copy.deepcopy(model)
    batches = [torch.randn(2, length, 16) for length in (8, 5, 7, 5, 9)]
    stage = Stage(model, [batches[0].clone().requires_grad_()], memory="lean")
    outputs = [
        stage.forward(at, [x], keep="inputs" if at == 2 else "saved")[0]
        for at, x in enumerate(batches)
    ]
    stage.recompute(2)
    expected = []
    for x in batches:
        leaf = x.clone().requires_grad_()
        plain(leaf).square().sum().backward()
        expected.append(leaf.grad)
    for at, output in enumerate(outputs):
        (grad,) = stage.backward_input(at, [2 * output])
        assert grad is not None
        assert torch.equal(grad, expected[at])
    for microbatch in range(len(batches)):
        stage.backward_weight(microbatch)
    stage.publish()
    assert_same_gradients(model, plain)
    assert len(stage.captured) == 2
    assert stage.output_specs[0][0] == (2, 9, 16)
    for wrong in (batches[0].double(), batches[0][0]):
        with pytest.raises(SplitError, match=r"input 0 must be torch.float32 like \[2, 8, 16\]"):
            stage.forward(0, [wrong])


def test_sizes_are_prepared_for() -> None:
    stage = Stage(nn.Linear(4, 2), [torch.randn(3, 4)])
    stage.prepare([torch.randn(6, 4)])
    assert stage.output_specs == [((6, 2), torch.float32, True)]
    assert stage.accepts([torch.randn(9, 4)])
    assert not stage.accepts([torch.randn(9, 4, requires_grad=True)])
    assert len(stage.captured) == 2


@pytest.mark.parametrize(
    ("inner", "rows", "kept"),
    [(nn.Linear(4, 4), 3, True), (nn.Linear(4, 4), 2, False), (nn.BatchNorm1d(4), 3, True)],
)
def test_a_steady_forward_runs_what_the_one_before_ran(
    inner: nn.Module, rows: int, kept: bool
) -> None:
    """But where sizes are others, and never in another step."""
    x = torch.randn(3, 4)
    module = Made(lambda m, x: m.scale * m.inner(x), inner=inner, scale=1.0)
    stage = Stage(module, [x])
    (first,) = stage.forward(0, [x.clone()])
    module.scale = 2.0
    (second,) = stage.forward(1, [x[:rows].clone()], steady=True)
    (third,) = stage.forward(2, [x.clone()])
    assert torch.allclose(third, 2 * first)
    if rows == 3:
        assert torch.allclose(second, first if kept else 2 * first)
    else:
        assert torch.allclose(second, 2 * first[:rows], atol=1e-6)


def test_a_steady_forward_runs_what_an_earlier_one_of_its_sizes_ran() -> None:
    x = torch.randn(3, 4)
    module = Made(lambda m, x: m.scale * m.inner(x), inner=nn.Linear(4, 4), scale=1.0)
    stage = Stage(module, [x])
    (first,) = stage.forward(0, [x.clone()])
    stage.forward(1, [x[:2].clone()], steady=True)
    module.scale = 2.0  # unseen, because guards are not checked
    (third,) = stage.forward(2, [x.clone()], steady=True)
    assert torch.equal(third, first)
    assert stage.output_specs[0][0] == (3, 4)


@pytest.mark.parametrize(
    "change", [lambda p: p.add_(1), lambda p: setattr(p, "data", p.detach().clone())]
)
def test_parameters_stay_as_they_were_at_the_first_forward_of_a_step(
    change: Callable[[Tensor], Any],
) -> None:
    """Steady forwards compare with what the first has recorded, and record nothing themselves."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    stage = Stage(model, [x])
    for microbatch in range(3):
        stage.forward(microbatch, [x.clone()], steady=microbatch > 0)
    stage.backward_input(0, [torch.ones(3, 2)])
    with torch.no_grad():
        change(model[2].weight)
    for microbatch in (1, 3):
        if microbatch == 3:
            stage.forward(microbatch, [x.clone()], steady=True)
        with pytest.raises(SplitError, match=r"2\.weight"):
            stage.backward_input(microbatch, [torch.ones(3, 2)])
    stage.reset()
    stage.forward(4, [x.clone()])
    stage.backward_input(4, [torch.ones(3, 2)])


def test_a_steady_forward_checks_guards_on_values_that_a_forward_writes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        output: Tensor = m.inner(x) * (2.0 if m.steps.item() > 2 else 1.0)
        m.steps.add_(1)
        return output

    module, x = Made(forward, inner=nn.Linear(4, 4)), torch.randn(3, 4)
    module.register_buffer("steps", torch.tensor(0))
    stage = Stage(module, [x])
    outputs = [stage.forward(at, [x.clone()], steady=at > 0)[0] for at in range(4)]
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[3], 2 * outputs[0])
    assert len(stage.captured) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_numbers_in_tensors_without_dimensions(dtype: torch.dtype) -> None:
    """Captures read them, and the module may branch on them, in each microbatch of one step."""

    def forward(m: Any, x: Tensor, weight: Tensor) -> Tensor:
        doubled: Tensor = m.inner(x) * (2.0 if weight.item() > 2 else 1.0)
        return doubled * weight * m.scale

    module, x = Made(forward, inner=nn.Linear(4, 4), scale=1.0), torch.randn(3, 4)
    stage = Stage(module, [x, torch.tensor(1, dtype=dtype)])
    for at, value in enumerate((1, 3, 2, 4)):
        module.scale = 1.0 + at // 2
        weight = torch.tensor(value, dtype=dtype)
        (output,) = stage.forward(at, [x.clone(), weight], steady=at % 2 == 1)
        assert torch.equal(output, module(x, weight))
    assert len(stage.captured) == 4


@dataclasses.dataclass
class Weighted:
    values: Tensor
    weights: Tensor
    power: int


def test_objects_are_inputs() -> None:
    module = layered(lambda m, item: m.linear(item.values * item.weights).pow(item.power))
    twin = copy.deepcopy(module)
    inputs = [Weighted(torch.randn(3, 4), torch.randn(4), 2) for _ in range(3)]
    stage = Stage(module, [inputs[0]])
    for at, element in enumerate(inputs):
        (output,) = stage.forward(at, [element])
        expected = twin(element)
        assert torch.equal(output, expected)
        expected.sum().backward()
        assert stage.backward_input(at, [torch.ones(3, 4)]) == [None, None]
        stage.backward_weight(at)
    stage.publish()
    assert_same_gradients(module, twin)
    element = dataclasses.replace(inputs[0], power=3)  # a number needs a capture of its own
    assert torch.equal(stage.forward(3, [element])[0], twin(element))
    assert len(stage.captured) == 2


def test_a_missing_gradient_in_every_microbatch_of_large_parameters() -> None:
    """The second W adds into accumulators, in the form without the missing gradient."""
    module = Made(
        lambda m, x: (m.b(hidden := torch.tanh(m.a(x))), hidden),
        a=nn.Linear(600, 600),
        b=nn.Linear(600, 600),
    )
    x = torch.randn(2, 600, requires_grad=True)
    stage = Stage(module, [x])
    for microbatch in range(2):
        output, _ = stage.forward(microbatch, [x])
        stage.backward_input(microbatch, [torch.ones_like(output), None])
        stage.backward_weight(microbatch)
    stage.publish()
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    for _ in range(2):
        module(x)[0].sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
