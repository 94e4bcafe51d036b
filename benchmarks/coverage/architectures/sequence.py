"""Encoders, and encoder-decoders."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from .architecture import Architecture, Inputs
from .language import SIZES, tokens

HALVES: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
T5: dict[str, Any] = {
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
PROPHET: dict[str, Any] = {
    key.replace("encoder_layers", "num_encoder_layers")
    .replace("decoder_layers", "num_decoder_layers")
    .replace("encoder_attention", "num_encoder_attention")
    .replace("decoder_attention", "num_decoder_attention"): value
    for key, value in HALVES.items()
}


def masked_tokens() -> dict[str, Any]:
    """Two sequences of eight tokens, the second padded from its sixth."""
    batch = tokens()
    batch["attention_mask"] = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    return batch


def _masked(
    model_type: str, can_tie: bool = False, inputs: Inputs = masked_tokens, **config: Any
) -> Architecture:
    sizes = {key: value for key, value in SIZES.items() if key != "use_cache"}
    return Architecture(model_type, AutoModelForMaskedLM, {**sizes, **config}, inputs, can_tie)


def _translating(model_type: str, can_tie: bool = False, **config: Any) -> Architecture:
    return Architecture(model_type, AutoModelForSeq2SeqLM, {**SIZES, **config}, tokens, can_tie)


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
    _translating("t5", can_tie=True, **T5),
    _translating("mt5", can_tie=True, **T5),
    _translating("umt5", **T5),
    _translating("longt5", local_radius=3, **T5),
    _translating("switch_transformers", num_experts=4, **T5),
    _translating("bart", can_tie=True, **HALVES),
    _translating("mbart", **HALVES),
    _translating("plbart", **HALVES),
    _translating("pegasus", **HALVES),
    _translating("marian", **HALVES),
    _translating("blenderbot", **HALVES),
    _translating("blenderbot-small", **HALVES),
    _translating("m2m_100", **HALVES),
    _translating("fsmt", langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64, **HALVES),
    _translating("led", attention_window=4, **HALVES),
    _translating("nllb-moe", num_experts=4, **HALVES),
)
