"""The families' models, built by transformers from its own configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from examples.families.settings import (
    BertSettings,
    LlamaSettings,
    MambaSettings,
    ResNetSettings,
)
from examples.stages import seeded

_WEIGHTS = 0  # the part of a seed, see `seeded`


def build_llama(settings: LlamaSettings) -> nn.Module:
    from transformers import LlamaForCausalLM

    return _seeded(settings.seed, LlamaForCausalLM, llama_config(settings))


def build_bert(settings: BertSettings) -> nn.Module:
    from transformers import BertForMaskedLM

    return _seeded(settings.seed, BertForMaskedLM, bert_config(settings))


def build_mamba(settings: MambaSettings) -> nn.Module:
    from transformers import MambaForCausalLM

    return _seeded(settings.seed, MambaForCausalLM, mamba_config(settings))


def build_resnet(settings: ResNetSettings) -> nn.Module:
    from transformers import ResNetForImageClassification

    return _seeded(settings.seed, ResNetForImageClassification, resnet_config(settings))


def _seeded(seed: int, kind: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    with seeded(seed, _WEIGHTS):
        model: Any = kind(config)
    model.tie_weights()  # as transformers 5.0 does not where parameters have no memory
    made: nn.Module = model.train()
    return made


def llama_config(settings: LlamaSettings) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=max(settings.seq, 2048),
        tie_word_embeddings=settings.tied,
        use_cache=False,
    )


def bert_config(settings: BertSettings) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=max(settings.seq, 512),
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        tie_word_embeddings=settings.tied,
    )


def mamba_config(settings: MambaSettings) -> Any:
    from transformers import MambaConfig

    return MambaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        state_size=settings.state,
        tie_word_embeddings=settings.tied,
        use_cache=False,
    )


def resnet_config(settings: ResNetSettings) -> Any:
    from transformers import ResNetConfig

    depths = settings.resolutions
    config = ResNetConfig(
        embedding_size=settings.width,
        hidden_sizes=[4 * settings.width * 2**number for number in range(len(depths))],
        depths=depths,
    )
    config.num_labels = settings.classes
    return config
