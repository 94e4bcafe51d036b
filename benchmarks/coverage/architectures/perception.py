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
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from .architecture import Architecture, Prepare, nothing
from .inputs import (
    labelled_areas,
    labelled_pixels,
    labelled_spectrum,
    pairs,
    patches,
    pixels,
    spectrum,
    spoken,
    waves,
)
from .sizes import HALVES, IMAGES, TEXT, WIDTHS, Sizes

WINDOWS: Sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1]}
STAGES: Sizes = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
RESIDUAL: Sizes = {
    "embedding_size": 8,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
}
PYRAMID: Sizes = {**STAGES, "num_attention_heads": [1, 2, 2, 2]}
WAVES: Sizes = {
    **WIDTHS,
    "vocab_size": 32,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
SPEECH: Sizes = {**HALVES, "vocab_size": 32}
LISTENER: Sizes = {**TEXT, "use_cache": False}
CONFORMER: Sizes = {
    "input_dim": 8,
    "num_layers": 2,
    "hidden_dim": 32,
    "feedforward_mult": 2,
    "num_heads": 4,
    "dim_head": 8,
    "output_dim": 10,
    "context_size": 4,
    "max_pos_emb": 16,
    "conv_kernel_size": 3,
}


def _seeing(model_type: str, size: int = 32, **config: Any) -> Architecture:
    return Architecture(
        model_type,
        AutoModelForImageClassification,
        {"num_labels": 3, **config},
        lambda: labelled_pixels(size),
    )


def _freeze_features(model: Any) -> None:
    """As in fine-tuning. A trainable one sets requires_grad of its input, which no graph holds."""
    model.feature_extractor._freeze_parameters()


def _hearing(
    model_type: str, variant: str = "", prepare: Prepare = _freeze_features, **config: Any
) -> Architecture:
    sizes = {**WAVES, **config}
    return Architecture(model_type, AutoModel, sizes, waves, variant=variant, prepare=prepare)


def _matching(model_type: str, **text: Any) -> Architecture:
    config = {"text_config": {**TEXT, **text}, "vision_config": IMAGES, "projection_dim": 16}
    return Architecture(model_type, AutoModel, config, pairs)


VISION = (
    _seeing("vit", **IMAGES),
    _seeing("vit_msn", **IMAGES),
    _seeing("beit", **IMAGES),
    _seeing("data2vec-vision", **IMAGES),
    _seeing("dinov2", **IMAGES),
    _seeing("dinov2_with_registers", **IMAGES),
    _seeing("ijepa", **IMAGES),
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
            **IMAGES,
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
    _hearing(
        "wav2vec2",
        variant="pretraining",
        prepare=nothing,
        layerdrop=0.1,
        apply_spec_augment=True,
        mask_time_length=2,
    ),
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
            **WIDTHS,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "num_labels": 2,
        },
        labelled_spectrum,
    ),
    Architecture(
        "granite_speech",
        AutoModelForSpeechSeq2Seq,
        {
            "text_config": {"model_type": "granite", "num_key_value_heads": 2, **LISTENER},
            "encoder_config": CONFORMER,
            "projector_config": {
                **WIDTHS,
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 1,
                "encoder_hidden_size": 32,
                "cross_attention_frequency": 1,
                "vocab_size": 64,
            },
            "audio_token_index": 3,
            "has_lora_adapter": False,
            "downsample_rate": 2,
            "window_size": 4,
        },
        lambda: spoken(4, 8, 8, input_features_mask=torch.ones(2, 4, dtype=torch.bool)),
    ),
    Architecture(
        "qwen2_audio",
        AutoModelForSeq2SeqLM,
        {
            "text_config": {"model_type": "qwen2", "num_key_value_heads": 2, **LISTENER},
            "audio_config": {
                "num_mel_bins": 8,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "d_model": 32,
                "max_source_positions": 16,
            },
            "audio_token_index": 3,
        },
        lambda: spoken(8, 8, 32, feature_attention_mask=torch.ones(2, 32, dtype=torch.int64)),
    ),
)

TEXT_AND_IMAGE = (
    _matching("clip"),
    _matching("siglip"),
    Architecture(
        "siglip2",
        AutoModel,
        {
            "text_config": {**TEXT, "projection_size": 32},
            "vision_config": {**IMAGES, "image_size": 16, "patch_size": 4, "num_patches": 16},
        },
        patches,
    ),
    _matching("blip", encoder_hidden_size=32),
)
