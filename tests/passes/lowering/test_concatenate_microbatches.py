"""batch: W of several microbatches with one product for each parameter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autosplit.backends.eager import Eager
from autosplit.passes import memory_setting, run
from autosplit.passes.analysis.operator_cost import graph_flops
from autosplit.passes.graph import STATE, Kind, inputs
from autosplit.passes.lowering.concatenate_microbatches import (
    concatenate_microbatches,
    microbatch_role,
)
from autosplit.passes.verify import verify_graph
from autosplit.runtime.compiled_graph import compile_graph
from tests.passes.graphs import Made, names_out, ops, program_of, value_of
from tests.zoo import PlainParameters, RepeatedLayer, TiedEmbedding


def weight(model: nn.Module, *args: Tensor, late_input: bool = False) -> fx.GraphModule:
    setting = memory_setting("balanced", late_input=late_input)
    module = run(program_of(model, *args).joint, memory=setting).backward_weight
    assert module is not None
    return module


def assert_sum_of(plain: fx.GraphModule, together: fx.GraphModule, count: int) -> None:
    """One call over ``count`` microbatches gives the sum of as many calls."""
    verify_graph("backward_weight", together, "batch")
    assert names_out(together, Kind.PARAMETER_GRAD) == names_out(plain, Kind.PARAMETER_GRAD)
    assert graph_flops(together.graph) == count * graph_flops(plain.graph)
    values = {role: value_of(node) for role, node in inputs(together.graph).items()}
    found = compile_graph("together", together, Eager()).call(list(values.values()))
    call = compile_graph("plain", plain, Eager())
    expected = [
        call.call([values[r if r.kind in STATE else microbatch_role(r, m)] for r in call.inputs])
        for m in range(count)
    ]
    for mine, *theirs in zip(found, *expected, strict=True):
        torch.testing.assert_close(mine, sum(theirs), rtol=1e-4, atol=1e-5)


def test_factors_are_concatenated_as_they_lie_in_memory() -> None:
    """Not as transposed views, whose rows would be gathered element by element."""
    together = concatenate_microbatches(
        weight(nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)), 2
    )
    cats = [node for node in together.graph.nodes if node.target is torch.ops.aten.cat.default]
    assert [tuple(node.meta["val"].shape) for node in cats] == [(8, 2), (8, 3)]


def test_convolutions_are_added_up() -> None:
    """Concatenated images take longer than they save."""
    plain = weight(nn.Conv1d(3, 4, 2), torch.randn(5, 3, 6, requires_grad=True))
    together = concatenate_microbatches(plain, 3)
    assert ops(together) == {"convolution_backward": 3, "add": 4}
    assert_sum_of(plain, together, 3)


def test_batched_products() -> None:
    experts = Made(lambda m, x: torch.bmm(x, m.up), up=torch.randn(3, 4, 5))
    plain = weight(experts, torch.randn(3, 2, 4, requires_grad=True))
    together = concatenate_microbatches(plain, 2)
    assert ops(together)["bmm"] == 1
    assert_sum_of(plain, together, 2)


def test_contributions_are_added_once() -> None:
    """A weight used twice: two products over all microbatches and one addition."""
    plain = weight(RepeatedLayer(), torch.randn(5, 6, requires_grad=True))
    together = concatenate_microbatches(plain, 3)
    assert ops(together)["mm"] == ops(plain)["mm"] == 3
    assert_sum_of(plain, together, 3)


def test_work_before_the_products_stays_each_microbatchs_own() -> None:
    """All of the backward is W where I is late, with the statistics of each microbatch."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6))
    plain = weight(model, torch.randn(5, 6), late_input=True)
    together = concatenate_microbatches(plain, 2)
    counts = ops(together)
    assert counts["native_batch_norm_backward"] == 2
    assert counts["mm"] == 2 + 2  # for two weights; for the input's gradient of two microbatches
    assert_sum_of(plain, together, 2)


def test_gradient_that_other_work_reads() -> None:
    """``b``'s gradient is made from ``a``'s, of each microbatch by itself."""

    made = Made(lambda m, x: x @ (m.a + m.b.sin()), a=torch.randn(4, 3), b=torch.randn(4, 3))
    plain = weight(made, torch.randn(5, 4, requires_grad=True))
    assert_sum_of(plain, concatenate_microbatches(plain, 3), 3)


def test_gradients_without_a_product() -> None:
    scaled = Made(
        lambda m, tokens: F.embedding(tokens, m.table, scale_grad_by_freq=True) * m.scale,
        table=torch.randn(11, 8),
        scale=torch.randn(8),
    )
    plain = weight(scaled, torch.randint(0, 11, (3, 5)))
    together = concatenate_microbatches(plain, 2)
    assert ops(together)["embedding_dense_backward"] == 2  # how often a token occurs in each
    assert_sum_of(plain, together, 2)
    plain = weight(PlainParameters(), torch.randn(3, requires_grad=True))
    assert_sum_of(plain, concatenate_microbatches(plain, 2), 2)


def test_embedding_of_all_tokens() -> None:
    plain = weight(TiedEmbedding(), torch.randint(0, 11, (3, 5)))
    together = concatenate_microbatches(plain, 2)
    assert ops(together)["embedding_dense_backward"] == 1
    assert_sum_of(plain, together, 2)
