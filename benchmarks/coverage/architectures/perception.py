"""Vision, audio, and text with images."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForObjectDetection,
    AutoModelForPreTraining,
    AutoModelForSemanticSegmentation,
    AutoModelForSpeechSeq2Seq,
)

from .architecture import Architecture

PATCHES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
WINDOWS: dict[str, Any] = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1]}
STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
RESIDUAL: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
}
PYRAMID: dict[str, Any] = {**STAGES, "num_attention_heads": [1, 2, 2, 2]}
WAVES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def pixels(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size, requires_grad=True)}


def labelled_pixels(size: int = 32) -> dict[str, Any]:
    return {**pixels(size), "labels": torch.randint(0, 3, (2,))}


def labelled_areas() -> dict[str, Any]:
    return {**pixels(), "labels": torch.randint(0, 3, (2, 32, 32))}


def waves() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 800)}


def spectrum(*shape: int) -> dict[str, Any]:
    features = torch.randn(2, *shape, requires_grad=True)
    return {"input_features": features, "labels": torch.randint(3, 32, (2, 4))}


def labelled_spectrum() -> dict[str, Any]:
    features = torch.randn(2, 32, 16, requires_grad=True)
    return {"input_values": features, "labels": torch.randint(0, 2, (2,))}


def pairs() -> dict[str, Any]:
    ids = torch.randint(3, 64, (2, 8))
    ids[:, -1] = 2
    return {"input_ids": ids, **pixels(), "return_loss": True}


def _seeing(model_type: str, size: int = 32, **config: Any) -> Architecture:
    return Architecture(
        model_type,
        AutoModelForImageClassification,
        {"num_labels": 3, **config},
        lambda: labelled_pixels(size),
    )


def _hearing(model_type: str, **config: Any) -> Architecture:
    return Architecture(model_type, AutoModel, {**WAVES, **config}, waves)


def _matching(model_type: str, **text: Any) -> Architecture:
    vision = {key: PATCHES[key] for key in PATCHES}
    config = {"text_config": {**TEXT, **text}, "vision_config": vision, "projection_dim": 16}
    return Architecture(model_type, AutoModel, config, pairs)


VISION = (
    _seeing("vit", **PATCHES),
    _seeing("vit_msn", **PATCHES),
    _seeing("beit", **PATCHES),
    _seeing("data2vec-vision", **PATCHES),
    _seeing("dinov2", **PATCHES),
    _seeing("dinov2_with_registers", **PATCHES),
    _seeing("ijepa", **PATCHES),
    _seeing("swin", num_heads=[2, 2], window_size=4, **WINDOWS),
    _seeing("swinv2", num_heads=[2, 2], window_size=4, **WINDOWS),
    _seeing("convnext", num_stages=4, **STAGES),
    _seeing("convnextv2", num_stages=4, **STAGES),
    _seeing("resnet", **RESIDUAL),
    _seeing("regnet", groups_width=8, **RESIDUAL),
    _seeing("bit", num_groups=4, **RESIDUAL),
    _seeing("mobilenet_v1", depth_multiplier=0.25),
    _seeing("mobilenet_v2", depth_multiplier=0.25),
    _seeing("poolformer", **STAGES),
    _seeing("segformer", decoder_hidden_size=16, **PYRAMID),
    _seeing("pvt", image_size=32, **PYRAMID),
    _seeing("focalnet", image_size=32, embed_dim=8, depths=[1, 1], hidden_sizes=[8, 16]),
    _seeing("swiftformer", embed_dims=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    Architecture(
        "vit_mae",
        AutoModelForPreTraining,
        {
            **PATCHES,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        pixels,
    ),
    Architecture(
        "segformer",
        AutoModelForSemanticSegmentation,
        {**PYRAMID, "decoder_hidden_size": 16, "num_labels": 3},
        labelled_areas,
        variant="segmentation",
    ),
    Architecture(
        "detr",
        AutoModelForObjectDetection,
        {
            **SPEECH,
            "backbone_config": {"model_type": "resnet", **RESIDUAL, "out_features": ["stage4"]},
            "num_queries": 4,
            "num_labels": 3,
            "use_timm_backbone": False,
        },
        lambda: pixels(64),
    ),
)

AUDIO = (
    _hearing("wav2vec2"),
    _hearing("hubert"),
    _hearing("wavlm"),
    _hearing("unispeech"),
    _hearing("unispeech-sat"),
    _hearing("data2vec-audio"),
    _hearing("wav2vec2-conformer"),
    _hearing("sew", squeeze_factor=2),
    Architecture(
        "whisper",
        AutoModelForSpeechSeq2Seq,
        {**SPEECH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        lambda: spectrum(8, 32),
        can_tie=True,
    ),
    Architecture(
        "speech_to_text",
        AutoModelForSpeechSeq2Seq,
        {**SPEECH, "input_feat_per_channel": 8, "conv_channels": 16},
        lambda: spectrum(32, 8),
    ),
    Architecture(
        "audio-spectrogram-transformer",
        AutoModelForAudioClassification,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "num_labels": 2,
        },
        labelled_spectrum,
    ),
)

TEXT_AND_IMAGE = (
    _matching("clip"),
    _matching("siglip"),
    _matching("blip", encoder_hidden_size=32),
)
