"""Whole models of any depth from transformers' configurations: narrow, so that starting counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

TOKENS, WIDTH = 32, 64
_VOCABULARY = 256
_IMAGE = 32

Batch = dict[str, Tensor]
Subject = tuple[nn.Module, Batch]

_TEXT = {"vocab_size": _VOCABULARY, "max_position_embeddings": 2 * TOKENS}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _tokens() -> Batch:
    ids = torch.randint(3, _VOCABULARY, (2, TOKENS))
    return {"input_ids": ids, "labels": ids}


def _image() -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, _IMAGE, _IMAGE),
        "labels": torch.randint(0, 2, (2,)),
    }


def _built(family: Any, kind: str, layers: int, width: int, **sizes: Any) -> nn.Module:
    widths = {"hidden_size": width, "num_attention_heads": 4, "intermediate_size": 2 * width}
    config = AutoConfig.for_model(kind, num_hidden_layers=layers, **widths, **sizes)
    model: nn.Module = family.from_config(config)
    return model.train()


def _llama(layers: int, width: int = WIDTH) -> Subject:
    return _built(AutoModelForCausalLM, "llama", layers, width, **_TEXT, **_SPECIAL), _tokens()


def _bert(layers: int, width: int = WIDTH) -> Subject:
    return _built(AutoModelForMaskedLM, "bert", layers, width, **_TEXT, **_NO_DROPOUT), _tokens()


def _mixture(layers: int, width: int = WIDTH) -> Subject:
    sizes = {**_TEXT, **_SPECIAL, "num_key_value_heads": 4, "num_local_experts": 4}
    return _built(AutoModelForCausalLM, "mixtral", layers, width, **sizes), _tokens()


def _vit(layers: int, width: int = WIDTH) -> Subject:
    # Else the first call sets it, and runs without a capture because of that.
    problem = {"problem_type": "single_label_classification"}
    sizes = {**_NO_DROPOUT, "image_size": _IMAGE, "patch_size": 8, **problem}
    return _built(AutoModelForImageClassification, "vit", layers, width, **sizes), _image()


MODELS: dict[str, Callable[..., Subject]] = {
    "llama": _llama,
    "bert": _bert,
    "mixture of experts": _mixture,
    "vit": _vit,
}
"""Model -> (layers, width -> the model in training mode, keyword arguments of a call with a loss).
"""
