"""Models with graph breaks against plain autograd."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.dynamo.partial_model import Partial
from tests.dynamo.breaking import (
    MODELS,
    Branch,
    DisabledMiddle,
    SideEffects,
    TwoLayers,
    Unbreakable,
)
from tests.dynamo.comparing import assert_same, assert_same_state, train
from tests.zoo import CASES


@pytest.mark.parametrize(("training", "count"), [(True, 3), (False, 2)], ids=["train", "eval"])
@pytest.mark.parametrize("build", MODELS)
def test_equals_autograd(build: type[TwoLayers], training: bool, count: int) -> None:
    model = build().train(training)
    reference = copy.deepcopy(model)
    partial = Partial(model)
    batches = [torch.randn(3, 4) for _ in range(count)]
    mine = train(partial, batches)
    assert partial.pending == (0 if build is Unbreakable else count)
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
