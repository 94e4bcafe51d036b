"""Models in parts: split graph by graph, over one microbatch and several."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.dynamo.partial_model import Partial
from tests.dynamo.breaking import (
    MODELS,
    Branch,
    DisabledMiddle,
    Nested,
    SideEffects,
    Tied,
    TwoLayers,
    Unbreakable,
    loss_of,
)
from tests.pending import deferred_tensors
from tests.zoo import CASES

# --- results of two models, and how to compare them -----------------------------------------------


def train(forward: object, batches: list[Tensor]) -> list[Tensor | None]:
    """Losses and input gradients of a forward and backward over each batch."""
    found: list[Tensor | None] = []
    for batch in batches:
        leaf = batch.clone().requires_grad_()
        loss = loss_of(forward(leaf))  # type: ignore[operator]
        loss.backward()
        found += [loss.detach(), leaf.grad]
    return found


def assert_same(mine: Tensor | None, theirs: Tensor | None, name: str) -> None:
    assert (mine is None) == (theirs is None), f"{name}: {mine} against {theirs}"
    if mine is not None and theirs is not None:
        assert torch.equal(mine, theirs), f"{name}: off by {(mine - theirs).abs().max()}"


def assert_same_state(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert_same(a, b, name)
        assert_same(a.grad, b.grad, f"gradient of {name}")
    for (name, a), b in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        assert_same(a, b, name)


# --- models with graph breaks against plain autograd ----------------------------------------------


@pytest.mark.parametrize("build", MODELS)
def test_equals_autograd(build: type[TwoLayers]) -> None:
    model = build()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    batches = [torch.randn(3, 4) for _ in range(2)]
    mine = train(partial, batches)
    assert partial.pending == (0 if build is Unbreakable else 2)
    partial.backward_weight()
    assert partial.pending == 0
    for index, (a, b) in enumerate(zip(mine, train(reference, batches), strict=True)):
        assert_same(a, b, f"result {index}")
    assert_same_state(model, reference)


@pytest.mark.parametrize("name", CASES)
def test_models_without_breaks_are_one_split_graph(name: str) -> None:
    case = CASES[name]
    model = case.build()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    for forward in (partial, reference):
        torch.manual_seed(1)
        for _ in range(2):
            batch = case.batch()
            case.loss(forward(batch.requires_grad_(batch.is_floating_point()))).backward()
    assert [part.state for part in partial.parts] == ["split"]
    assert partial.breaks == ()
    partial.backward_weight()
    assert_same_state(model, reference)


def test_hooks_that_are_added_later() -> None:
    """torch.compile leaves hooks on submodules out of its guards."""
    model = TwoLayers()
    reference = copy.deepcopy(model)
    partial, x = Partial(model), torch.randn(3, 4)
    partial(x)
    handles = [
        each.a.register_forward_hook(lambda module, args, output: output * 10)
        for each in (model, reference)
    ]
    assert_same(partial(x), reference(x), "with a hook")
    for handle in handles:
        handle.remove()
    assert_same(partial(x), reference(x), "without it again")


def test_a_compiler_that_copies_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Lightning makes torch.compile one."""
    compiler = torch.compile

    @functools.wraps(compiler)
    def copying(model: nn.Module, **options: Any) -> Any:
        copy.deepcopy(options)
        return compiler(model, **options)

    monkeypatch.setattr(torch, "compile", copying)
    partial = Partial(TwoLayers())
    assert partial.pending == 0


def test_python_side_effects_happen() -> None:
    model = SideEffects()
    partial = Partial(model)
    for rows in (3, 3, 2):
        partial(torch.randn(rows, 4)).sum().backward()
    assert model.calls == 3
    assert model.log == ["3 rows", "3 rows", "2 rows"]
    partial.backward_weight()


def test_both_branches_on_data() -> None:
    model = Branch()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    batches = list(torch.randn(8, 3, 4))
    with torch.no_grad():
        assert {bool(reference.a(batch).sum() > 0) for batch in batches} == {True, False}
    mine = train(partial, batches)
    partial.backward_weight()
    for a, b in zip(mine, train(reference, batches), strict=True):
        assert_same(a, b, "result")
    assert_same_state(model, reference)


def test_weight_used_by_a_graph_and_by_code_outside() -> None:
    class Shared(DisabledMiddle):
        def __init__(self) -> None:
            super().__init__()
            self.middle.weight = self.a.weight

    model = Shared().double()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    batches = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]
    train(partial, batches)
    partial.backward_weight()
    train(reference, batches)
    # The two contributions are added in another order than by one backward.
    torch.testing.assert_close(model.a.weight.grad, reference.a.weight.grad, rtol=1e-14, atol=1e-14)
    assert partial.history is not None
    assert model.a.weight in partial.history.deferred
    assert model.a.weight in partial.history.ordinary


def test_dropout_draws_as_autograd_does_and_backward_leaves_the_generator_alone() -> None:
    class Dropping(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.dropout(self.a(x), 0.5)
            torch._dynamo.graph_break()
            return nn.functional.dropout(self.b(h), 0.5)

    model = Dropping(32)
    reference = copy.deepcopy(model)
    partial = Partial(model)
    x = torch.randn(8, 32)
    partial(x)  # compiling draws nothing from the generator that the next lines seed
    torch.manual_seed(3)
    outputs = [partial(x), partial(x)]
    state = torch.get_rng_state()
    for output in outputs:
        output.square().sum().backward()
    partial.backward_weight()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    expected = [reference(x), reference(x)]
    for output in expected:
        output.square().sum().backward()
    for mine, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert_same_state(model, reference)


def test_shapes_that_vary_become_symbolic() -> None:
    model = TwoLayers()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    batches = [torch.randn(rows, 4) for rows in (3, 5, 2, 7, 9)]
    mine = train(partial, batches)
    # One pair of graphs for the first shape, one for all others.
    assert [part.state for part in partial.parts] == ["split"] * 4
    partial.backward_weight()
    for a, b in zip(mine, train(reference, batches), strict=True):
        assert_same(a, b, "result")
    assert_same_state(model, reference)


def test_symbolic_sizes_that_gradients_need_are_deferred_too() -> None:
    class Mean(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) * self.b.bias.expand(len(x), 4)
            return (h.reshape(-1) / h.numel()).reshape(4, -1) @ self.b(x).repeat(2, 1)[: len(x)]

    model = Mean()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    batches = [torch.randn(rows, 4) for rows in (3, 5, 8)]
    mine = train(partial, batches)
    assert [part.state for part in partial.parts] == ["split"] * 2
    partial.backward_weight()
    for a, b in zip(mine, train(reference, batches), strict=True):
        assert_same(a, b, "result")
    assert_same_state(model, reference)


def test_changes_of_mode_recompile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), TwoLayers())
    reference = copy.deepcopy(model)
    partial = Partial(model)
    x = torch.randn(5, 4)

    def modes(forward: object, module: nn.Module) -> None:
        module.train()
        train(forward, [x])
        module.eval()
        train(forward, [x])
        with torch.no_grad():
            forward(x)  # type: ignore[operator]
        module[0].weight.requires_grad_(False)  # type: ignore[union-attr]
        train(forward, [x])

    modes(partial, model)
    assert partial.pending == 3
    partial.backward_weight()
    modes(reference, reference)
    assert_same_state(model, reference)


def test_parameters_frozen_and_thawed() -> None:
    model = TwoLayers()
    reference = copy.deepcopy(model)
    for forward, module in ((Partial(model), model), (reference, reference)):
        for frozen in (True, False, True):
            module.a.weight.requires_grad_(not frozen)
            train(forward, [torch.ones(3, 4)])
            if isinstance(forward, Partial):
                forward.backward_weight()
    assert model.a.weight.grad is not None
    assert_same_state(model, reference)


def test_recomputation_in_the_backward() -> None:
    class Checkpointed(TwoLayers):
        use_reentrant = False

        def inner(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            torch._dynamo.graph_break()
            return self.b(h).sin()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(
                self.inner, x, use_reentrant=self.use_reentrant
            ).square()

    for reentrant in (False, True):
        torch._dynamo.reset()
        model = Checkpointed()
        model.use_reentrant = reentrant
        reference = copy.deepcopy(model)
        partial = Partial(model)
        batches = [torch.randn(3, 4) for _ in range(2)]
        mine = train(partial, batches)
        assert partial.pending in (0, 2)  # where Dynamo leaves the whole call alone, nothing is
        partial.backward_weight()
        for a, b in zip(mine, train(reference, batches), strict=True):
            assert_same(a, b, "result")
        assert_same_state(model, reference)


def test_autocast_around_the_step_changes_no_deferred_operator() -> None:
    model = TwoLayers()
    reference = copy.deepcopy(model)
    partial = Partial(model)
    x = torch.randn(3, 4)
    for forward in (partial, reference):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = forward(x)
            output.float().square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        partial.backward_weight()
    assert_same_state(model, reference)


# --- models with graph breaks: what one microbatch is, and what it holds --------------------------


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
