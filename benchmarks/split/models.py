"""The models, as stages in the middle of a pipeline: hidden states in, hidden states out.

Random weights from transformers' configurations, in training mode. There is no dropout, so
that gradients can be compared bit for bit and attention runs fused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.families import settings as families
from examples.families.models import bert_config, llama_config, mamba_config, resnet_config
from examples.families.settings import (
    PAPER,
    BertSettings,
    LlamaSettings,
    MambaSettings,
    ResNetSettings,
)
from examples.workload import configure

from ..page import option


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with the input of one microbatch and the gradient of its output."""

    name: str
    module: nn.Module
    x: Tensor
    grad: Tensor


def build(
    name: str, settings: Any, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Subject:
    """The same weights and data on every call.

    Raises:
        KeyError: no such model.
    """
    make = BUILDERS[name]
    # One seed here, not one inside: the caller's random numbers are nobody's business.
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        module = make(settings).to(dtype).train()
        x = torch.randn(shape(settings), dtype=dtype)
        with torch.no_grad():
            grad = torch.randn_like(module(x))
    return Subject(name, module, x, grad)


class Hidden(nn.Module):
    """Layers of a model of transformers between its embedding and its head: the last hidden state.

    Args:
        layers: called with hidden values.
        name: of the argument that these are.
    """

    def __init__(self, layers: nn.Module, name: str) -> None:
        super().__init__()
        self.layers, self.name = layers, name

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(**{self.name: x}).last_hidden_state
        return hidden


def llama(settings: LlamaSettings) -> nn.Module:
    """Decoder layers and the final norm."""
    from transformers import LlamaModel

    model = LlamaModel(llama_config(settings))
    del model.embed_tokens
    return Hidden(model, "inputs_embeds")


def bert(settings: BertSettings) -> nn.Module:
    """Encoder layers."""
    from transformers import BertModel

    return Hidden(
        BertModel(bert_config(settings), add_pooling_layer=False).encoder, "hidden_states"
    )


def mamba(settings: MambaSettings) -> nn.Module:
    """Mixer layers and the final norm; the scan over the sequence is transformers' loop."""
    from transformers import MambaModel

    model = MambaModel(mamba_config(settings))
    del model.embeddings
    return Hidden(model, "inputs_embeds")


def resnet(settings: ResNetSettings) -> nn.Module:
    """Stages of residual layers; the input has as many channels as the stem puts out."""
    from transformers import ResNetModel

    return Hidden(ResNetModel(resnet_config(settings)).encoder, "hidden_state")


BUILDERS: dict[str, Callable[[Any], nn.Module]] = {
    "llama": llama,
    "bert": bert,
    "mamba": mamba,
    "resnet": resnet,
}


def shape(settings: families.Settings) -> tuple[int, ...]:
    """Of the input, the microbatch first. An image's stem leaves a quarter of its sides."""
    if isinstance(settings, ResNetSettings):
        side = settings.image // 4
        return (settings.microbatch_size, settings.width, side, side)
    return (settings.microbatch_size, settings.seq, settings.width)


SMALL: dict[str, families.Settings] = {
    "llama": LlamaSettings(),
    "bert": BertSettings(),
    "mamba": MambaSettings(layers=2, seq=48, microbatch_size=2),
    "resnet": ResNetSettings(depths="2,2,2", width=32, image=224, microbatch_size=2),
}
"""50 to 500 ms a step on one core or two."""

TINY: dict[str, families.Settings] = {
    "llama": LlamaSettings(width=128, hidden=352, layers=1, heads=2, seq=8),
    "bert": BertSettings(width=128, hidden=512, layers=1, heads=2, seq=8),
    "mamba": MambaSettings(width=16, layers=1, seq=4, microbatch_size=2),
    "resnet": ResNetSettings(depths="1,1", width=8, image=32, microbatch_size=2),
}
"""Only to see that the measuring works."""

LARGE: dict[str, families.Settings] = {
    "llama": configure(LlamaSettings, {**PAPER["llama"], "vocabulary": 8, "layers": 8}),
    "bert": configure(BertSettings, {**PAPER["bert"], "vocabulary": 8, "microbatch_size": 8}),
    "mamba": configure(
        MambaSettings,
        {**PAPER["mamba"], "vocabulary": 8, "layers": 12, "seq": 128, "microbatch_size": 1},
    ),
    "resnet": configure(ResNetSettings, {**PAPER["resnet"], "microbatch_size": 32}),
}
"""For a data-centre GPU in bfloat16: a quarter of LLaMA-7B, BERT-Large, a quarter of
Mamba-1.4B with a sequence that the loop of its scan can unroll, ResNet-152."""

SIZES = {"small": SMALL, "tiny": TINY, "large": LARGE}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and how often."""

    models: tuple[str, ...] = option((*SMALL,), "of transformers", SMALL)
    threads: tuple[int, ...] = option((1, 2), "every time is measured with each")
    rounds: int = option(15, "timed microbatches of each contender")
    device: str = option("cpu", "where", ["cpu", "cuda"])
    size: str = option("small", 'of the models; "large" is for a GPU', SIZES)

    def subject(self, model: str) -> Subject:
        """A model and its microbatch."""
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return build(model, SIZES[self.size][model], self.device, dtype)
