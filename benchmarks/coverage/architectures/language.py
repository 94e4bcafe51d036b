"""Causal language models: dense decoders, mixtures of experts, state-space and recurrent."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from .architecture import Architecture
from .inputs import tokens
from .sizes import TEXT, Sizes

GROUPED: Sizes = {"num_key_value_heads": 2}
HEADS: Sizes = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS: Sizes = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED: Sizes = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT: Sizes = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
SCAN: Sizes = {"state_size": 4, "time_step_rank": 2}
SCAN_HEADS: Sizes = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}


def _causal(model_type: str, can_tie: bool = False, **config: Any) -> Architecture:
    sizes = {**TEXT, "use_cache": False, **config}
    return Architecture(model_type, AutoModelForCausalLM, sizes, tokens, can_tie)


DECODERS = (
    _causal("openai-gpt"),
    _causal("gpt2", can_tie=True),
    _causal("gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]]),
    _causal("gptj", rotary_dim=4, can_tie=True),
    _causal("gpt_neox", can_tie=True),
    _causal("codegen", rotary_dim=4),
    _causal("ctrl", n_embd=32, n_head=4, n_layer=2, dff=64),
    _causal("opt", word_embed_proj_dim=32, ffn_dim=64, can_tie=True),
    _causal("bloom", can_tie=True),
    _causal("mpt", d_model=32, n_heads=4, n_layers=2),
    _causal("xglm", d_model=32, attention_heads=4, num_layers=2, ffn_dim=64),
    _causal("biogpt"),
    _causal("llama", can_tie=True, **GROUPED),
    _causal("mistral", can_tie=True, sliding_window=4, **GROUPED),
    _causal("qwen2", can_tie=True, **GROUPED),
    _causal("qwen3", can_tie=True, **HEADS),
    _causal("gemma", can_tie=True, **HEADS),
    _causal("gemma2", can_tie=True, sliding_window=4, **HEADS),
    _causal("gemma3_text", can_tie=True, sliding_window=4, **HEADS),
    _causal("phi", can_tie=True),
    _causal("phi3", can_tie=True, **GROUPED),
    _causal("falcon", can_tie=True),
    _causal("stablelm", can_tie=True, **GROUPED),
    _causal("olmo", can_tie=True, **GROUPED),
    _causal("olmo2", **GROUPED),
    _causal("olmo3", **GROUPED),
    _causal("granite", can_tie=True, **GROUPED),
    _causal("cohere", can_tie=True, **GROUPED),
    _causal("cohere2", sliding_window=4, **GROUPED),
    _causal("starcoder2", can_tie=True, **GROUPED),
    _causal("nemotron", can_tie=True, **GROUPED),
    _causal("persimmon"),
    _causal("glm", **HEADS),
    _causal("glm4", **HEADS),
    _causal("helium", **HEADS),
    _causal("smollm3", can_tie=True, **GROUPED),
    _causal("ernie4_5", **HEADS),
    _causal("exaone4", **GROUPED),
    _causal("seed_oss", **HEADS),
    _causal("hunyuan_v1_dense", **HEADS),
    _causal("arcee", **GROUPED),
    _causal("apertus", **GROUPED),
    _causal("bitnet", **GROUPED),
    _causal("diffllama", **GROUPED),
    Architecture(
        "xlnet",
        AutoModelForCausalLM,
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
        | {"use_mems_train": False, "use_mems_eval": False},
        tokens,
    ),
)

MIXTURES = (
    _causal("mixtral", can_tie=True, num_local_experts=4, **GROUPED),
    _causal(
        "qwen2_moe",
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        **EXPERTS,
        **GROUPED,
    ),
    _causal("qwen3_moe", can_tie=True, moe_intermediate_size=16, **EXPERTS, **HEADS),
    _causal("olmoe", **EXPERTS, **GROUPED),
    _causal("phimoe", num_local_experts=4, **GROUPED),
    _causal("granitemoe", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    _causal("deepseek_v2", n_group=1, **ROUTED, **LATENT),
    _causal("deepseek_v3", n_group=2, **ROUTED, **LATENT),
    _causal("glm4_moe", first_k_dense_replace=1, **ROUTED, **HEADS),
    _causal("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4, **HEADS),
    _causal(
        "ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_layer_start_index=1,
        **GROUPED,
    ),
    _causal("jetmoe", num_local_experts=4, num_experts_per_tok=2, kv_channels=8, **GROUPED),
    _causal("minimax", num_local_experts=4, **HEADS),
)

STATE_SPACE = (
    _causal("mamba", can_tie=True, **SCAN),
    _causal("falcon_mamba", **SCAN),
    _causal(
        "mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4, can_tie=True
    ),
    _causal("rwkv", attention_hidden_size=32, context_length=64),
    _causal(
        "recurrent_gemma",
        **{**HEADS, "num_hidden_layers": 3},
        lru_width=32,
        attention_window_size=4,
    ),
    _causal("bamba", attn_layer_indices=[1], **SCAN_HEADS, **GROUPED),
    _causal("falcon_h1", mamba_d_ssm=64, **SCAN_HEADS, **HEADS),
    _causal(
        "jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=2,
        **{**GROUPED, "num_experts": 2},
    ),
    _causal(
        "qwen3_next",
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **EXPERTS,
        **HEADS,
    ),
    _causal("lfm2", **GROUPED),
    _causal("xlstm", embedding_dim=32, num_heads=4, num_blocks=2),
)
