"""Sizes that configurations share. All are tiny: what counts is which operators run."""

from __future__ import annotations

from typing import Any

Sizes = dict[str, Any]

WIDTHS: Sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SPECIAL_TOKENS: Sizes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: Sizes = {**WIDTHS, **SPECIAL_TOKENS, "vocab_size": 64, "max_position_embeddings": 64}
IMAGES: Sizes = {**WIDTHS, "image_size": 32, "patch_size": 8}
HALVES: Sizes = {
    **SPECIAL_TOKENS,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
"""An encoder and a decoder; Hugging Face has such names for them in most models."""
NO_DROPPED_LAYERS: Sizes = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
"""Stochastic depth drops whole layers by a branch on a random number, which no graph holds."""
