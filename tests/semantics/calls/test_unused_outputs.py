"""Outputs that a loss does not use: no gradient, no zeros in its place, no work for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autosplit
from autosplit.passes.graph import calls
from autosplit.runtime.functions import SplitFunctions
from autosplit.torch_internals.allocations import allocations_on
from tests.semantics.against_autograd import assert_equals_autograd, leaves
from tests.zoo import Made, layered


class Mixing(torch.autograd.Function):
    """Its backward adds and multiplies the gradients of both outputs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, b * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return g * 2 + h, h * 3 - g


MODELS: dict[str, Callable[[Any, Tensor], Any]] = {
    "chain": lambda m, x: (y := m.linear(x), z := m.second(y), z.exp()),
    "parts of one": lambda m, x: [part.tanh() for part in m.linear(x).split([1, 3], -1)],
    "columns": lambda m, x: m.second(m.linear(x)).t().unbind(),
    "statistics": lambda m, x: torch.var_mean(m.linear(x), -1),
    "function of two": lambda m, x: Mixing.apply(m.linear(x), m.second(x)),
    "views": lambda m, x: (y := m.linear(x), y.t(), y[:2], m.second(y)),
    "scalar beside what it is of": lambda m, x: ((y := m.linear(x)).sum(), y),
}


def with_root(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The root's derivative is infinite."""
    y = model.linear(x)
    return y, (y * 0).sqrt()


def using(places: Iterator[tuple[int, ...]]) -> Callable[[Any], Tensor]:
    """A loss of the outputs in these places, in every call of the next ones."""

    def loss(outputs: Any) -> Tensor:
        result = pytree.tree_leaves(outputs)
        used = [result[at] for at in next(places)]
        return torch.stack([(at + 1) * item.square().mean() for at, item in enumerate(used)]).sum()

    return loss


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autograd_bit_for_bit(name: str) -> None:
    """Of microbatches that use other outputs, and wait together for W."""
    loss = using(cycle([(0,), (1,), (0, 1)]))
    assert_equals_autograd(layered(MODELS[name]), leaves(3, 4, count=3), loss)


def test_an_infinite_derivative_of_an_unused_output_is_not_nan() -> None:
    assert_equals_autograd(layered(with_root), leaves(3, 4), using(cycle([(0,)])))


def test_beyond_three_sets_of_unused_outputs_zeros_are_right() -> None:
    used = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]
    loss = using(cycle(used))
    split = assert_equals_autograd(layered(MODELS["chain"]), leaves(3, 4, count=6), loss)
    assert split.report().count("run I and W of their own") == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_compiled_models(dynamic: bool) -> None:
    model = layered(MODELS["parts of one"])
    compiled: Any = torch.compile(model, backend="autosplit", dynamic=dynamic)
    for rows in (3, 5, 6):
        x = torch.randn(rows, 4)
        wanted = torch.autograd.grad(model(x)[1].sum(), [*model.linear.parameters()])
        compiled(x)[1].sum().backward()
        autosplit.backward_weight(model)
        for parameter, grad in zip(model.linear.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, grad)
        model.zero_grad()


def test_a_stage_whose_output_the_next_one_does_not_use() -> None:
    model, x = layered(with_root), torch.randn(3, 4, requires_grad=True)
    wanted = torch.autograd.grad(model(x)[0].sum(), [x, *model.linear.parameters()])
    stage = autosplit.Stage(model, [x], index=1)
    stage.forward(0, [x.detach()])
    (got,) = stage.backward_input(0, [torch.ones(3, 4), None])
    stage.backward_weight(0)
    stage.forward(1, [x.detach()])
    stage.backward(1, [torch.ones(3, 4), None])
    stage.publish()
    assert got is not None
    assert torch.equal(got, wanted[0])
    for parameter, grad in zip(model.linear.parameters(), wanted[1:], strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, 2 * grad)


VOCABULARY = 2048


def backward_peak(split: Any, ids: Tensor) -> int:
    """Bytes that ``loss.backward()`` allocates at most, once graphs are compiled."""
    split(ids)["loss"].backward()
    loss = split(ids)["loss"]
    with allocations_on(torch.device("cpu")) as allocations:
        allocations.mark()
        loss.backward()
    return allocations.stretches()[0].highest


def only(split: Any) -> SplitFunctions:
    """The callables of the backwards that have run."""
    functions = split._graphs.latest
    (missing,) = functions.specialized
    result: SplitFunctions = functions._specialized[missing]
    return result


def operators(functions: SplitFunctions) -> int:
    graphs = functions.graphs
    halves = (graphs.backward_input, graphs.backward_weight)
    return sum(len([*calls(half.graph)]) for half in halves if half is not None)


def language_model(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """What a model of transformers returns: the loss, logits, and the keys of its cache."""
    x = model.embed(ids)
    keys = model.linear(x).unflatten(-1, (2, 2)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(keys, keys, keys, is_causal=True)
    logits = model.head(model.second(mixed.transpose(1, 2).flatten(2)))
    shifted = F.pad(ids, (0, 1), value=-100)[..., 1:]
    loss = F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())
    return {"loss": loss, "logits": logits, "keys": keys}


def test_a_language_model_pays_nothing_for_logits_and_cache() -> None:
    ids = torch.randint(VOCABULARY, (2, 64))
    embed, head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY, bias=False)
    model = layered(language_model, embed=embed, head=head)
    whole = autosplit.split(model)
    loss_alone = autosplit.split(Made(lambda m, ids: {"loss": m.whole(ids)["loss"]}, whole=model))
    peak, least = backward_peak(whole, ids), backward_peak(loss_alone, ids)
    functions, logits = only(whole), ids.numel() * VOCABULARY
    graph = functions.graphs.backward_input
    assert graph is not None
    assert not [node for node in calls(graph.graph) if "full" in str(node.target)]
    assert peak - least < logits  # a quarter of the logits' bytes
    # Keys have other strides than their gradients.
    assert operators(functions) - operators(loss_alone._graphs.latest) <= 2
