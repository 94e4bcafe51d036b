"""I and W of whole models: which products are in which."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from autosplit import SplitModule
from autosplit.passes.graph import calls
from examples.families import FAMILIES, TINY
from tests.semantics.against_autograd import assert_alike

MAKING = {"mm", "bmm", "embedding_dense_backward", "convolution_backward"}

# Operators that make a weight's gradient: one for each matrix, convolution and table of embeddings.
PRODUCTS = {"llama": 9, "mamba": 7}

# Warnings that transformers' own code causes.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


def heavy(split: SplitModule, name: str) -> Counter[str]:
    (functions,) = split.functions
    graph = functions.graphs.graphs()[name].graph
    names = (str(node.target).removeprefix("aten.").split(".")[0] for node in calls(graph))
    return Counter(name for name in names if name in MAKING)


@pytest.mark.parametrize("name", PRODUCTS)
def test_halves_of_a_whole_model(name: str) -> None:
    family = FAMILIES[name](**{**TINY[name], "layers": 1})
    batches = [family.batch_fn(step, family.microbatch_size) for step in range(2)]

    def drive(call: Any, _: object) -> None:
        for inputs, targets in batches:
            family.loss_fn(call(inputs), targets).backward()

    split = assert_alike(family.build(), drive, pending=2)
    early, late = heavy(split, "backward_input"), heavy(split, "backward_weight")
    assert early
    assert "embedding_dense_backward" not in early
    assert late.total() == PRODUCTS[name]
    graph = split.functions[0].graphs.backward_weight.graph
    remaining = {str(node.target) for node in calls(graph)}
    assert not any("norm" in other or "attention" in other or "bmm" in other for other in remaining)
