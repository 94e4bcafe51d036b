"""Products of groups of rows, each with a matrix of its own: what experts do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from tests.semantics.against_autograd import assert_equals_autograd

GROUPED = torch.ops.aten._grouped_mm.default


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, width) / 4)
        self.down = nn.Parameter(torch.randn(3, 16, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([4, 5, 12], dtype=torch.int32)
        hidden = torch._grouped_mm(x, self.up, offs=ends).tanh()
        return torch._grouped_mm(hidden, self.down.transpose(1, 2), offs=ends).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24])
def test_all_weight_gradients_wait(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(12, 16, dtype=dtype).requires_grad_()
    split = assert_equals_autograd(Experts(width).to(dtype), [(x,)] * 2)
    # Twelve rows with a matrix of 16 x width, twice.
    assert f"({2 * 2 * 12 * 16 * width / 1e9:.1e} of" in split.report()
    weight = split.functions[0].graphs.backward_weight
    assert weight is not None
    assert len(weight.graph.find_nodes(op="call_function", target=GROUPED)) == 2


def mixture(experts: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=1, num_key_value_heads=2, num_local_experts=3
    )
    if not hasattr(config, "_experts_implementation"):
        pytest.skip("this transformers has loops over experts only")
    config._experts_implementation = experts
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def test_experts_of_transformers_by_the_advice() -> None:
    """A loop over those that have tokens is no graph; the error says what is one."""
    ids = torch.randint(20, (2, 6))
    with pytest.raises(CaptureError, match="experts_implementation='grouped_mm'"):
        autosplit.split(mixture("eager"), fullgraph=True)(input_ids=ids)
    split = autosplit.split(mixture("grouped_mm"), fullgraph=True)
    split(input_ids=ids, labels=ids)
    assert "Deferred: 100.0 %" in split.report()
