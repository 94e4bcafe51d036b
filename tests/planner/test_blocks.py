"""Places where models can be cut, the blocks between them, and refusals."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import transformers
from torch import Tensor, nn

from autosplit.errors import CaptureError, PlanError
from autosplit.planner import WholeModel, cut, partition
from tests.planner.planned_models import net, tokens
from tests.planner.whole_models import (
    captured,
    llama,
    llama_of_three,
    run_modules,
)
from tests.zoo import Made

# Mamba asks through a cached function which torch it runs on.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache")


def test_layers_of_a_transformer_are_two_blocks_each() -> None:
    _, whole = captured(llama_of_three)
    assert [block.name for block in whole.blocks] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1",
        "model.layers.1.post_attention_layernorm",
        "model.layers.2",
        "model.layers.2.post_attention_layernorm",
        "model.norm",
    ]
    assert all([t.shape for t in tensors] == [(2, 8, 32)] for tensors in whole.crossing)
    assert all(tensor.requires_grad for tensors in whole.crossing for tensor in tensors)


def test_equal_blocks_have_equal_signatures() -> None:
    signatures = [block.signature for block in captured(llama_of_three)[1].blocks]
    assert len(set(signatures)) == 4
    assert signatures[1] == signatures[3] == signatures[5]
    config = llama().model.config
    config.hidden_act = "relu"
    other = WholeModel.capture(transformers.LlamaForCausalLM(config), (), llama().kwargs)
    assert signatures[1] == other.blocks[1].signature
    assert signatures[2] != other.blocks[2].signature


def test_segments_run_by_themselves() -> None:
    _, whole = captured(llama)
    module, examples = whole.segment(1, 3)
    assert [(tuple(t.shape), t.requires_grad) for t in examples] == [
        ((2, 8, 32), True) if t.is_floating_point() else ((2, 8), False) for t in examples
    ]
    inputs = [torch.zeros(t.shape, dtype=t.dtype) for t in examples]
    (result,) = module(*inputs)
    assert result.shape == (2, 8, 32)
    assert {name.partition(".layers.")[0] for name, _ in module.named_parameters()} == {"model"}
    with pytest.raises(PlanError, match="first < last <= 6; got first=3 and last=3"):
        whole.segment(3, 3)


class Shared(nn.Module):
    """One batch norm for two layers, and a tensor that is written after a layer read it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.b(self.norm(self.a(x))))
        y = torch.relu(self.c(x))
        z = y.detach()
        z.add_(1)
        return self.d(y)


def test_a_cut_through_what_is_written_in_place_is_refused() -> None:
    args = (torch.randn(4, 8),)
    with pytest.raises(PlanError, match=r"before 'b': .* writes in place into state"):
        partition(Shared(), args, cut_at=["b"])
    whole = WholeModel.capture(Shared(), args)
    assert [block.name for block in whole.blocks] == ["a", "norm", "c", "d"]
    split = cut(whole, [1, 2])
    modules = [split.build(index) for index in range(3)]
    assert torch.equal(run_modules(split, modules, args), split.whole.model(*args))


@pytest.mark.parametrize(
    ("cut_at", "message"),
    [
        (["net.layers.7"], "not a module .* did you mean 'net.layers.[0123]'"),
        (["net"], "the start of the model"),
        (["net.head", "net.layers.1"], "increasing"),
    ],
)
def test_names_that_cannot_be_cut_at(cut_at: list[str], message: str) -> None:
    model = nn.Sequential(OrderedDict(net=net(), last=nn.Linear(11, 2)))
    with pytest.raises(PlanError, match=message):
        partition(model, tokens(), cut_at=cut_at)


def test_a_model_that_cannot_be_captured_whole() -> None:
    with pytest.raises(CaptureError, match=r"test_blocks.py:\d+") as error:
        partition(Made(lambda _, x: x if x.sum() > 0 else -x), torch.randn(4), stages=2)
    assert "list of stages" in str(error.value)
