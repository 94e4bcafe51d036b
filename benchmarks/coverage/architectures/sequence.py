"""Encoders, and encoder-decoders."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from .architecture import Architecture, Inputs
from .inputs import masked_tokens, tokens
from .sizes import HALVES, NO_DROPPED_LAYERS, TEXT, Sizes

T5: Sizes = {
    **TEXT,
    "use_cache": False,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}


def _masked(
    model_type: str, can_tie: bool = False, inputs: Inputs = masked_tokens, **config: Any
) -> Architecture:
    return Architecture(model_type, AutoModelForMaskedLM, {**TEXT, **config}, inputs, can_tie)


def _translating(
    model_type: str,
    can_tie: bool = False,
    sizes: Sizes = HALVES,
    inputs: Inputs = tokens,
    variant: str = "",
    **config: Any,
) -> Architecture:
    sizes = {**sizes, **config}
    return Architecture(model_type, AutoModelForSeq2SeqLM, sizes, inputs, can_tie, variant)


ENCODERS = (
    _masked("bert", can_tie=True),
    _masked("roberta", can_tie=True),
    _masked("xlm-roberta"),
    _masked("camembert"),
    _masked("electra", embedding_size=16, can_tie=True),
    _masked("albert", embedding_size=16, can_tie=True),
    _masked("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], can_tie=True),
    _masked("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], can_tie=True),
    _masked("distilbert", can_tie=True),
    _masked("mpnet", can_tie=True),
    _masked("modernbert", local_attention=4, global_attn_every_n_layers=2),
    _masked("nystromformer"),
    _masked("roformer"),
    _masked("squeezebert", embedding_size=32),
    _masked("fnet", inputs=tokens),
    _masked("layoutlm"),
    _masked("rembert", input_embedding_size=16, output_embedding_size=16),
    _masked("xlm"),
    _masked("flaubert"),
    _masked("ibert"),
    _masked("megatron-bert"),
    _masked("mobilebert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    _masked("convbert", embedding_size=32),
    _masked("longformer", attention_window=4),
    _masked("big_bird", attention_type="original_full"),
    _masked("esm", mask_token_id=3),
    Architecture(
        "funnel",
        AutoModelForMaskedLM,
        {"vocab_size": 64, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8}
        | {"d_inner": 64},
        masked_tokens,
    ),
)

ENCODER_DECODERS = (
    _translating("t5", can_tie=True, sizes=T5),
    _translating("mt5", can_tie=True, sizes=T5),
    _translating("umt5", sizes=T5),
    _translating("longt5", sizes=T5, inputs=masked_tokens, local_radius=3),
    _translating("switch_transformers", sizes=T5, num_experts=4),
    _translating("bart", can_tie=True),
    _translating("mbart"),
    _translating("plbart"),
    _translating("pegasus"),
    _translating("marian"),
    _translating("blenderbot"),
    _translating("blenderbot-small"),
    _translating("m2m_100", **NO_DROPPED_LAYERS),
    _translating("m2m_100", variant="drops layers"),
    _translating("fsmt", langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64),
    _translating("led", attention_window=4),
    _translating("nllb-moe", num_experts=4, **NO_DROPPED_LAYERS),
)
