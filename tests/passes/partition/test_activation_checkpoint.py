"""torch.utils.checkpoint in the graph: what is inside is recomputed, once, when it is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autosplit.passes import run
from autosplit.passes.analysis.operator_cost import is_random
from autosplit.passes.graph import Kind, calls
from tests.passes.graphs import copied, joint_of, names_out, ops
from tests.zoo import Attention, SwiGLU


class Checkpointed(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_regions_are_recomputed_when_they_are_needed() -> None:
    """Only their inputs are saved, and the first is recomputed after the second one's backward."""
    x = torch.randn(2, 4, 16, requires_grad=True)
    graphs = run(joint_of(Checkpointed(SwiGLU(), SwiGLU()), x))
    saved = names_out(graphs.forward, Kind.SAVED)
    assert saved == ["args_0", "blocks_1_norm_input"]  # the first block's input and the second's
    # Each block's three matrix products run in F; dX needs gate and up again (not down), and
    # they run once more in all, in I or W.
    assert ops(graphs.forward)["mm"] == 6
    again = ops(graphs.backward_input)["mm"] + ops(graphs.backward_weight)["mm"]
    assert again == 4 + 6 + 6
    assert ops(graphs.backward)["mm"] == again
    order = [str(node.target) for node in calls(graphs.backward_input.graph)]
    second_backward = order.index("aten.silu_backward.default")
    assert "aten.rsqrt.default" in order[second_backward:]


def test_attention_is_recomputed_and_dropout_is_not() -> None:
    x = torch.randn(2, 4, 16, requires_grad=True)
    model = Checkpointed(nn.Sequential(Attention(), nn.Dropout(0.5), nn.Linear(16, 16)))
    graphs = run(joint_of(model, x))
    backward = ops(graphs.backward_input)
    assert backward["_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert backward["native_dropout"] == 0
    halves = (graphs.backward_input, graphs.backward_weight)
    assert not [node for half in halves for node in calls(half.graph) if is_random(node)]


def test_checkpoints_do_not_chain() -> None:
    """Outputs of a region are saved, even cheap ones: else I would run all regions first."""
    x = torch.randn(2, 4, 16, requires_grad=True)
    joint = joint_of(Checkpointed(*[SwiGLU() for _ in range(3)]), x)
    for memory in ("fast", "balanced", "lean"):
        graphs = run(copied(joint), memory=memory)
        assert len(names_out(graphs.forward, Kind.SAVED)) == 3
