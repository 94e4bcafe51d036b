"""fuse: products and embeddings add into accumulators themselves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from autosplit.passes import Kind
from tests.passes.graphs import ops
from tests.zoo import CASES, Made, RepeatedLayer

from .weights import adding, assert_same_sums, one_by_one, run, values_of, weight_graph


def operators_of_fused(model: nn.Module, *args: Tensor) -> Counter[str]:
    """Fuse W of a module, compare its sums with the exact ones, and return its operators."""
    weight = weight_graph(model.double(), *args)
    fused, values = adding(weight, fuses="all"), values_of(weight)
    assert_same_sums(one_by_one(fused, values), one_by_one(adding(weight), values))
    return ops(fused)


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_layers_of_all_kinds_have_the_same_sums() -> None:
    counts = {}
    for name in ("linear", "encoder_layer", "convolutions"):
        counts[name] = operators_of_fused(CASES[name].build(), CASES[name].batch().double())
    products = {name: count["addmm_"] for name, count in counts.items()}
    assert products == {"linear": 1, "encoder_layer": 4, "convolutions": 1}


def test_batched_products_of_permuted_weights() -> None:
    experts = Made(
        lambda m, x: torch.bmm(torch.bmm(x, m.up), m.down.permute(1, 2, 0)),
        up=nn.Parameter(torch.randn(3, 4, 5)),
        down=nn.Parameter(torch.randn(4, 3, 5)),
    )
    counts = operators_of_fused(experts, batch(3, 2, 4))
    assert (counts["baddbmm_"], counts["add_"]) == (2, 0)


def test_products_of_the_first_microbatch_are_written_into_memory_that_is_not_initialized() -> None:
    case = CASES["transformer"]
    weight = weight_graph(case.build().double(), case.batch().double())
    values = values_of(weight)
    for role in values:
        if role.kind is Kind.ACCUMULATOR:
            values[role] = torch.full_like(values[role], torch.nan)
    fused, exact = (adding(weight, f, writes_first=True) for f in ("all", "none"))
    assert_same_sums(run(fused, values), run(exact, values))
    counts = ops(fused)
    assert (counts["addmm_"], counts["mm"]) == (5, 0)
    assert counts["copy_"] == ops(exact)["copy_"] - 5


def test_products_of_one_parameter_are_added_one_by_one() -> None:
    counts = operators_of_fused(RepeatedLayer(), batch(5, 6))
    assert (counts["addmm_"], counts["mm"]) == (3, 0)


@pytest.mark.parametrize("padding", [None, 1])
def test_embedding_adds_its_rows(padding: int | None) -> None:
    table = nn.Embedding(11, 8, padding_idx=padding)
    padded = Made(lambda m, tokens: m.table(tokens).sin(), table=table)
    counts = operators_of_fused(padded, torch.randint(0, 11, (1, 2)))
    assert (counts["index_add_"], counts["embedding_dense_backward"]) == (1, 0)


@pytest.mark.parametrize(("padding", "added"), [(None, 1), (1, 0)])
def test_masking_more_rows_than_the_table_has_would_take_longer(
    padding: int | None, added: int
) -> None:
    table = nn.Embedding(11, 8, padding_idx=padding)
    model = Made(lambda m, tokens: m.table(tokens).sin(), table=table)
    assert operators_of_fused(model, torch.randint(0, 11, (3, 5)))["index_add_"] == added


def test_other_gradients_are_left_whole() -> None:
    scaled = nn.Embedding(11, 8, scale_grad_by_freq=True)
    assert operators_of_fused(scaled, torch.randint(0, 11, (3, 5)))["index_add_"] == 0
    a, b = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    read_twice = Made(lambda m, x: x @ (m.a * m.b.sin() + m.a), a=a, b=b)
    assert operators_of_fused(read_twice, batch(5, 4))["addmm_"] == 0


def test_a_product_does_not_add_into_a_sum_of_another_dtype() -> None:
    case = CASES["bfloat16"]
    weight = weight_graph(case.build(), case.batch().requires_grad_())

    wide = adding(weight, fuses="all", dtype=torch.float32)
    assert ops(wide) == ops(adding(weight))
