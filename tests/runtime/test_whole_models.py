"""I and W of whole models: which products are in which, frozen parts, inputs with gradients."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitModule
from autosplit.passes.graph import calls
from examples.families import FAMILIES, TINY
from tests.gradients import assert_same_gradients
from tests.semantics.against_autograd import assert_equals_autograd

MAKING = {"mm", "bmm", "embedding_dense_backward", "convolution_backward"}
ONE = {"layers": 1}
LAYERS = {"llama": ONE, "mamba": ONE, "resnet": {"depths": "1,1"}}

# Operators that make a weight's gradient: one for each matrix, convolution and table of embeddings.
PRODUCTS = {"llama": 9, "mamba": 7, "resnet": 10}

# What transformers' own code makes torch say.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


class Run:
    """A model of one of the families, split, and a twin that stays as it is."""

    def __init__(self, name: str, **options: Any) -> None:
        family = FAMILIES[name](**{**TINY[name], **LAYERS[name]})
        torch.manual_seed(0)
        self.plain = family.build()
        self.split = autosplit.split(copy.deepcopy(self.plain), max_pending=math.inf, **options)
        self.batches = [family.batch_fn(step, family.microbatch_size) for step in range(3)]
        self.loss_fn = family.loss_fn

    def backward(self, count: int) -> None:
        for inputs, targets in self.batches[:count]:
            for model in (self.split, self.plain):
                self.loss_fn(model(inputs), targets).backward()


def heavy(split: SplitModule, name: str) -> Counter[str]:
    (functions,) = split.functions
    graph = functions.graphs.graphs()[name].graph
    names = (str(node.target).removeprefix("aten.").split(".")[0] for node in calls(graph))
    return Counter(name for name in names if name in MAKING)


@pytest.mark.parametrize("name", PRODUCTS)
def test_halves_of_a_whole_model(name: str) -> None:
    run = Run(name)
    run.backward(2)
    assert run.split.pending == 2
    early, late = heavy(run.split, "backward_input"), heavy(run.split, "backward_weight")
    assert early
    assert "embedding_dense_backward" not in early
    assert late.total() == PRODUCTS[name]
    graph = run.split.functions[0].graphs.backward_weight.graph
    others = {str(node.target) for node in calls(graph)}
    assert not any("norm" in each or "attention" in each or "bmm" in each for each in others)
    run.split.backward_weight()
    assert_same_gradients(run.split, run.plain)


class Adapted(nn.Module):
    """A frozen layer beside which a product of two small ones trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)).tanh()


class Skipping(nn.Module):
    """Token ids, and numbers that may need a gradient; puts out what skips later layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
        low = self.one(self.norm(self.embed(tokens)))
        return low, self.two(low.relu() + prompt)


def adapters() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8).requires_grad_(False), Adapted(), Adapted())


def frozen_bottom() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[:2].requires_grad_(False)
    model[1].bias.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("build", "memory"),
    [(adapters, "balanced"), (adapters, "lean"), (frozen_bottom, "fast"), (frozen_bottom, 4096)],
)
def test_frozen_parts(build: Callable[[], nn.Module], memory: str | int) -> None:
    tokens = [(torch.randint(0, 11, (3, 5)),) for _ in range(2)]
    assert_equals_autograd(build(), tokens, memory=memory)


@pytest.mark.parametrize(("prompted", "memory"), [(False, "balanced"), (True, "lean")])
def test_some_inputs_need_a_gradient(prompted: bool, memory: str) -> None:
    given = [
        (torch.randint(0, 11, (3, 5)), torch.randn(3, 5, 8).requires_grad_(prompted))
        for _ in range(2)
    ]
    assert_equals_autograd(Skipping(), given, memory=memory)
