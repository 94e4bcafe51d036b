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

from tests.dynamo.breaking import (
    MODELS,
    Branch,
    SideEffects,
    TwoLayers,
    loss_of,
)
from tests.dynamo.by_graphs import partial_of, split_by_graphs
from tests.pending import deferred_tensors
from tests.semantics.against_autograd import (
    assert_equals_autograd,
    assert_same,
    assert_same_state,
    one_by_one,
)

# --- models with graph breaks against plain autograd ----------------------------------------------


def batches(*rows: int) -> list[tuple[Tensor]]:
    return [(torch.randn(row, 4, requires_grad=True),) for row in rows]


@pytest.mark.parametrize("build", MODELS)
def test_equals_autograd(build: type[TwoLayers]) -> None:
    """One by one: autograd itself refuses what some of them write in between."""
    assert_equals_autograd(
        build(), batches(3, 3), loss_of, orders=[one_by_one], face=split_by_graphs
    )


def test_a_compiler_that_copies_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Lightning makes torch.compile one."""
    compiler = torch.compile

    @functools.wraps(compiler)
    def copying(model: nn.Module, **options: Any) -> Any:
        copy.deepcopy(options)
        return compiler(model, **options)

    monkeypatch.setattr(torch, "compile", copying)
    partial = split_by_graphs(TwoLayers())
    assert partial.pending == 0


def test_python_side_effects_happen() -> None:
    model = SideEffects()
    partial = split_by_graphs(model)
    for rows in (3, 3, 2):
        partial(torch.randn(rows, 4)).sum().backward()
    assert model.calls == 3
    assert model.log == ["3 rows", "3 rows", "2 rows"]
    partial.backward_weight()


def test_both_branches_on_data() -> None:
    model, inputs = Branch(), batches(*[3] * 8)
    with torch.no_grad():
        assert {bool(model.a(x).sum() > 0) for (x,) in inputs} == {True, False}
    assert_equals_autograd(model, inputs, face=split_by_graphs)


class Mean(TwoLayers):
    """Gradients need the symbolic sizes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.b.bias.expand(len(x), 4)
        return (h.reshape(-1) / h.numel()).reshape(4, -1) @ self.b(x).repeat(2, 1)[: len(x)]


@pytest.mark.parametrize(("build", "parts"), [(TwoLayers, 4), (Mean, 2)])
def test_shapes_that_vary_become_symbolic(build: type[nn.Module], parts: int) -> None:
    """Graphs for the first shape, and as many for all others."""
    partial = assert_equals_autograd(build(), batches(3, 5, 2, 7, 9), face=split_by_graphs)
    assert [part.state for part in partial_of(partial).parts] == ["split"] * parts


def test_changes_of_mode_recompile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), TwoLayers())
    reference = copy.deepcopy(model)
    partial, x = split_by_graphs(model), batches(5)

    def modes(forward: Any, module: nn.Module) -> None:
        module.train()
        one_by_one(forward, x, loss_of)
        module.eval()
        one_by_one(forward, x, loss_of)
        with torch.no_grad():
            forward(*x[0])
        module.get_parameter("0.weight").requires_grad_(False)
        one_by_one(forward, x, loss_of)

    modes(partial, model)
    assert partial.pending == 3
    partial.backward_weight()
    modes(reference, reference)
    assert_same_state(model, reference, assert_same)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_the_backward(reentrant: bool) -> None:
    """Nothing is pending if Dynamo skips the whole call."""

    class Checkpointed(TwoLayers):
        def inner(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            torch._dynamo.graph_break()
            return self.b(h).sin()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(
                self.inner, x, use_reentrant=reentrant
            ).square()

    assert_equals_autograd(Checkpointed(), batches(3, 3), face=split_by_graphs)


# --- models with graph breaks: what one microbatch is, and what it holds --------------------------


def test_microbatches_are_backwards_oldest_first() -> None:
    partial = split_by_graphs(Scaled())
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
    assert partial.pending == 1  # as for SplitModule: one backward through two calls


class Scaled(nn.Module):
    """Two graphs, each with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        torch._dynamo.graph_break()
        return h * self.weight


def test_model_dies_though_its_code_is_kept() -> None:
    """torch keeps a backend and what it compiled for as long as the process."""
    model = TwoLayers()
    partial = split_by_graphs(model)
    partial(torch.randn(3, 4)).square().sum().backward()
    partial.backward_weight()
    died = weakref.ref(model)
    del model, partial
    gc.collect()
    assert died() is None


def test_microbatch_dies_with_its_weight_gradients() -> None:
    partial = split_by_graphs(TwoLayers())
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
