"""Effects of the nodes of a graph: writes, random numbers, cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autosplit.capture.export import export
from autosplit.capture.forward_graph import capture_forward
from autosplit.capture.node_effects import Effect, EffectRecorder, examine

A, B = torch.randn(128, 128), torch.randn(128, 128)
IMAGE, KERNEL = torch.randn(1, 8, 6, 6), torch.randn(8, 8, 3, 3)


def effect_of(call: Callable[[], Any]) -> Effect:
    effect = Effect()
    with EffectRecorder(effect, []):
        effect.value = call()
    return effect


@pytest.mark.parametrize(
    ("call", "random", "heavy", "costly"),
    [
        (lambda: A + B, False, False, False),
        (lambda: A @ B, False, True, True),
        (lambda: A[:, :4] @ B[:4], False, True, False),  # few operations an element
        (lambda: F.conv2d(IMAGE, KERNEL), False, True, True),
        (lambda: F.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE), True, True, False),
        (lambda: torch.rand(3), True, False, False),
        (lambda: F.dropout(A, 0.5), True, False, False),
        (lambda: F.dropout(A @ B, 0.5), True, True, True),
    ],
    ids=["add", "matmul", "narrow", "convolution", "attention", "rand", "dropout", "both"],
)
def test_kinds(call: Callable[[], Any], random: bool, heavy: bool, costly: bool) -> None:
    effect = effect_of(call)
    assert (effect.random, effect.heavy) == (random, heavy)
    assert effect.costly is costly
    assert isinstance(effect.value, Tensor)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_are_written_in_training_only(training: bool) -> None:
    mean, var = torch.zeros(2), torch.ones(2)
    effect = effect_of(lambda: F.batch_norm(torch.ones(4, 2), mean, var, training=training))
    assert ({storage(mean), storage(var)} <= effect.writes) is training


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.linear(x)
        return F.dropout(h.view(-1), 0.5) + self.calls


def of_targets(effects: dict[fx.Node, Effect], *names: str) -> list[Effect]:
    built = (
        (str(node.target), effect) for node, effect in effects.items() if node.op[:4] == "call"
    )
    return [effect for target, effect in built if any(name in target for name in names)]


def test_nodes_of_a_captured_graph() -> None:
    model = Steps()
    exported, _ = export(model, (torch.randn(4, 128),), {})
    result = examine(exported)
    assert set(result) == set(exported.graph.nodes)
    (write,) = of_targets(result, "add_", "iadd")
    (product,) = of_targets(result, "linear")
    (view,) = of_targets(result, "view")
    (dropout,) = of_targets(result, "dropout")
    assert write.writes
    assert not product.writes | view.writes
    assert dropout.writes.isdisjoint(product.storages | write.writes)  # but its own mask
    assert product.heavy
    assert product.costly
    assert not view.heavy
    assert view.storages == product.storages  # one memory, two names
    assert dropout.random
    assert not product.random
    assert dropout.storages.isdisjoint(product.storages)
    assert torch.equal(model.calls, torch.zeros(1))  # nothing has run on real data


def _behind(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call


class Cached(nn.Module):
    """Returns a default of its forward, which is behind a decorator, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @_behind
    def forward(self, x: Tensor, cache: object = None) -> dict[str, Any]:
        return {"y": self.linear(x), "cache": cache}


def test_a_model_that_is_called_by_keywords_may_have_hooks() -> None:
    model = Cached()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {"x": kwargs["x"] + 1}), with_kwargs=True
    )
    captured = capture_forward(model, (), {"x": torch.randn(2, 4)})
    assert [leaf is None for leaf in captured.leaves] == [False, True]
    called = [node.target for node in captured.module.graph.nodes if node.op == "call_function"]
    assert len(called) == 2  # with the hook
