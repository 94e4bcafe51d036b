"""fuse: matrix products and embeddings add into the accumulator themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from autosplit.backends.eager import Eager
from autosplit.passes import run
from autosplit.passes.graph import inputs
from autosplit.passes.lowering.accumulate import accumulate, fuse_accumulation
from autosplit.passes.verify import verify_graph
from autosplit.runtime.compiled_graph import compile_graph
from tests.passes.graphs import Made, ops, program_of, value_of
from tests.zoo import CASES, RepeatedLayer


def forms(
    model: nn.Module, *args: Tensor, dtype: torch.dtype | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The accumulating W before and after."""
    module = run(program_of(model, *args).joint).backward_weight
    assert module is not None
    exact, fused = accumulate(module, dtype), accumulate(module, dtype)
    fuse_accumulation(fused.graph)
    fused.recompile()
    verify_graph("backward_weight_accumulating", fused, "fuse")
    return exact, fused


def assert_same_sums(exact: fx.GraphModule, fused: fx.GraphModule, seed: int = 0) -> None:
    """Both add the same to accumulators that hold something already."""
    found = []
    for module in (exact, fused):
        torch.manual_seed(seed)
        args = [value_of(node) for node in inputs(module.graph).values()]
        held = list(args)
        compile_graph("backward_weight", module, Eager()).call(args)
        found.append(held)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_batched_products() -> None:
    """Weights as they are, and permuted."""
    experts = Made(
        lambda m, x: torch.bmm(torch.bmm(x, m.up), m.down.permute(1, 2, 0)),
        up=torch.randn(3, 4, 5),
        down=torch.randn(4, 3, 5),
    )
    exact, fused = forms(experts, torch.randn(3, 2, 4, requires_grad=True))
    assert ops(fused)["baddbmm_"] == 2
    assert ops(fused)["add_"] == 0
    assert_same_sums(exact, fused)


def test_contributions_to_one_parameter_are_added_one_by_one() -> None:
    exact, fused = forms(RepeatedLayer(), torch.randn(5, 6, requires_grad=True))
    assert (ops(exact)["mm"], ops(exact)["add"]) == (3, 2)
    assert (ops(fused)["addmm_"], ops(fused)["add"]) == (3, 0)
    assert_same_sums(exact, fused)


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_scatters_its_rows(padding: int | None) -> None:
    """The gradient as large as the table is never made; the padding's row gets nothing."""

    table = nn.Embedding(11, 8, padding_idx=padding)
    padded = Made(lambda m, tokens: m.table(tokens).sin(), table=table)
    exact, fused = forms(padded, torch.randint(0, 11, (3, 5)))
    assert ops(exact)["embedding_dense_backward"] == ops(fused)["index_add_"] == 1
    assert ops(fused)["embedding_dense_backward"] == 0
    assert_same_sums(exact, fused)


def test_scaled_embedding_is_left_whole() -> None:
    table = nn.Embedding(11, 8, scale_grad_by_freq=True)
    exact, fused = forms(table, torch.randint(0, 11, (3, 5)))
    assert ops(fused) == ops(exact)


def test_other_dtype_is_left_whole() -> None:
    """A product of bfloat16 matrices cannot add into float32."""
    case = CASES["bfloat16"]
    exact, fused = forms(case.build(), case.batch().requires_grad_(), dtype=torch.float32)
    assert ops(fused) == ops(exact)
    assert_same_sums(exact, fused)


def test_product_that_something_else_reads_is_left_whole() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    reads = Made(lambda m, x: x @ (m.a * m.b.sin() + m.a), a=a, b=b)
    exact, fused = forms(reads, torch.randn(5, 4, requires_grad=True))
    assert ops(fused)["addmm_"] == 0
    assert_same_sums(exact, fused)


def test_convolutions_are_left_whole() -> None:
    _, fused = forms(CASES["convolutions"].build(), torch.randn(4, 3, 8, 8, requires_grad=True))
    assert ops(fused)["convolution_backward"] == 3
    assert ops(fused)["addmm_"] == 1  # the head
