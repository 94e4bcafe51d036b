"""The models, as stages in the middle of a pipeline: hidden states in, hidden states out.

Random weights from transformers' configurations, in training mode. There is no dropout, so
that gradients can be compared bit for bit and attention runs fused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Size:
    """One model at one size.

    Attributes:
        settings: of the model's configuration.
        shape: of the input, the microbatch first.
    """

    settings: Mapping[str, Any]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with the input of one microbatch and the gradient of its output."""

    name: str
    module: nn.Module
    x: Tensor
    grad: Tensor


def build(
    name: str, size: Size, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Subject:
    """The same weights and data on every call.

    Raises:
        KeyError: no such model.
    """
    make = BUILDERS[name]
    # One seed here, not one inside: the caller's random numbers are nobody's business.
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        module = make(size.settings).to(dtype).train()
        x = torch.randn(size.shape, dtype=dtype)
        with torch.no_grad():
            grad = torch.randn_like(module(x))
    return Subject(name, module, x, grad)


class Llama(nn.Module):
    """Decoder layers and the final norm."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.model = LlamaModel(LlamaConfig(vocab_size=8, use_cache=False, **settings))
        del self.model.embed_tokens

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.model(inputs_embeds=x).last_hidden_state
        return hidden


class Bert(nn.Module):
    """Encoder layers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        still: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertModel(BertConfig(vocab_size=8, **still, **settings), add_pooling_layer=False)
        self.encoder = model.encoder

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(x).last_hidden_state
        return hidden


class Mamba(nn.Module):
    """Mixer layers and the final norm; the scan over the sequence is transformers' loop."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import MambaConfig, MambaModel

        self.model = MambaModel(MambaConfig(vocab_size=8, use_cache=False, **settings))
        del self.model.embeddings

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.model(inputs_embeds=x).last_hidden_state
        return hidden


class ResNet(nn.Module):
    """Stages of residual layers; the input has ``embedding_size`` channels."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        self.encoder = ResNetModel(ResNetConfig(**settings)).encoder

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(x).last_hidden_state
        return hidden


BUILDERS: dict[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "llama": Llama,
    "bert": Bert,
    "mamba": Mamba,
    "resnet": ResNet,
}


def _llama(width: int, layers: int) -> dict[str, Any]:
    heads = width // (128 if width >= 1024 else 64)
    return {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }


def _bert(width: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }


def _mamba(width: int, layers: int) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": layers, "state_size": 16}


def _resnet(depths: list[int], scale: int) -> dict[str, Any]:
    return {
        "embedding_size": 64 // scale,
        "hidden_sizes": [256 // scale, 512 // scale, 1024 // scale, 2048 // scale][: len(depths)],
        "depths": depths,
    }


SMALL: dict[str, Size] = {
    "llama": Size(_llama(384, 4), (2, 128, 384)),
    "bert": Size(_bert(384, 4), (2, 128, 384)),
    "mamba": Size(_mamba(256, 2), (2, 48, 256)),
    "resnet": Size(_resnet([2, 2, 2], scale=2), (2, 32, 56, 56)),
}
"""50 to 500 ms a step on one core or two."""

TINY: dict[str, Size] = {
    "llama": Size(_llama(128, 2), (2, 8, 128)),
    "bert": Size(_bert(128, 2), (2, 8, 128)),
    "mamba": Size(_mamba(16, 1), (2, 4, 16)),
    "resnet": Size(_resnet([1, 1], scale=8), (2, 8, 8, 8)),
}
"""Only to see that the measuring works."""

LARGE: dict[str, Size] = {
    "llama": Size(_llama(4096, 8) | {"intermediate_size": 11008}, (1, 1024, 4096)),
    "bert": Size(_bert(1024, 24), (8, 512, 1024)),
    "mamba": Size(_mamba(2048, 12), (1, 128, 2048)),
    "resnet": Size(_resnet([3, 8, 36, 3], scale=1), (32, 64, 56, 56)),
}
"""For a data-centre GPU in bfloat16: a quarter of LLaMA-7B, BERT-Large, a quarter of
Mamba-1.4B with a sequence that the loop of its scan can unroll, ResNet-152."""

SIZES = {"small": SMALL, "tiny": TINY, "large": LARGE}
