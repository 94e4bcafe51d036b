"""fuse: matrix products and embeddings add into the accumulator themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autosplit.backends.eager import Eager
from autosplit.passes import run
from autosplit.passes.graph import inputs
from autosplit.passes.lowering.accumulate import accumulate, fuse_accumulation
from autosplit.passes.verify import verify_graph
from autosplit.runtime.compiled_graph import compile_graph
from tests.passes.graphs import ops, program_of, value_of
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


class Experts(nn.Module):
    """Weights used in a batched product, once as they are and once permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 5))
        self.down = nn.Parameter(torch.randn(4, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, self.up), self.down.permute(1, 2, 0))


def test_batched_products() -> None:
    exact, fused = forms(Experts(), torch.randn(3, 2, 4, requires_grad=True))
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

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8, padding_idx=padding)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).sin()

    exact, fused = forms(Padded(), torch.randint(0, 11, (3, 5)))
    assert ops(exact)["embedding_dense_backward"] == ops(fused)["index_add_"] == 1
    assert ops(fused)["embedding_dense_backward"] == 0
    assert_same_sums(exact, fused)


def test_scaled_embedding_is_left_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(11, 8))

        def forward(self, tokens: Tensor) -> Tensor:
            return F.embedding(tokens, self.table, scale_grad_by_freq=True)

    exact, fused = forms(Scaled(), torch.randint(0, 11, (3, 5)))
    assert ops(fused) == ops(exact)


def test_other_dtype_is_left_whole() -> None:
    """A product of bfloat16 matrices cannot add into float32."""
    case = CASES["bfloat16"]
    exact, fused = forms(case.build(), case.batch().requires_grad_(), dtype=torch.float32)
    assert ops(fused) == ops(exact)
    assert_same_sums(exact, fused)


def test_product_that_something_else_reads_is_left_whole() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 3))
            self.b = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a * self.b.sin() + self.a)

    exact, fused = forms(Reads(), torch.randn(5, 4, requires_grad=True))
    assert ops(fused)["addmm_"] == 0
    assert_same_sums(exact, fused)


def test_convolutions_are_left_whole() -> None:
    _, fused = forms(CASES["convolutions"].build(), torch.randn(4, 3, 8, 8, requires_grad=True))
    assert ops(fused)["convolution_backward"] == 3
    assert ops(fused)["addmm_"] == 1  # the head
