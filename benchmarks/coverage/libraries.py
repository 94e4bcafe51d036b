"""Models of other libraries than transformers, small, with random weights.

Those that are installed: ``pip install timm torchvision diffusers peft x-transformers
segmentation-models-pytorch``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .subject import Call, Subject

Made = tuple[Callable[[], nn.Module], Callable[[], Call]]


def _images(side: int = 32) -> Call:
    return (torch.randn(2, 3, side, side, requires_grad=True),), {}


def _timm(name: str, side: int = 32, **sizes: Any) -> Made:
    def build() -> nn.Module:
        made: nn.Module = importlib.import_module("timm").create_model(
            name, pretrained=False, num_classes=7, **sizes
        )
        return made

    return build, partial(_images, side)


def _torchvision(name: str, side: int = 64, **sizes: Any) -> Made:
    def build() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        made: nn.Module = getattr(models, name)(weights=None, num_classes=7, **sizes)
        return made

    return build, partial(_images, side)


def _segmentation(name: str) -> Made:
    def build() -> nn.Module:
        library = importlib.import_module("segmentation_models_pytorch")
        made: nn.Module = getattr(library, name)("resnet18", encoder_weights=None, classes=3)
        return made

    return build, partial(_images, 64)


class _Sample(nn.Module):
    """A model of diffusers, which returns a tuple rather than an object."""

    def __init__(self, kind: str, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.model = getattr(importlib.import_module("diffusers"), kind)(**sizes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, return_dict=False, **kwargs)[0]


def _diffusers(kind: str, call: Callable[[], Call], **sizes: Any) -> Made:
    return partial(_Sample, kind, sizes), call


def _noisy(channels: int, *, text: int = 0, classes: bool = False, pooled: int = 0) -> Call:
    given: dict[str, Any] = {"timestep": torch.randint(0, 1000, (2,))}
    if text:
        given["encoder_hidden_states"] = torch.randn(2, 5, text)
    if pooled:
        given["pooled_projections"] = torch.randn(2, pooled)
    if classes:
        given["class_labels"] = torch.randint(0, 10, (2,))
    return (torch.randn(2, channels, 16, 16, requires_grad=True),), given


_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def _adapted(method: str, **options: Any) -> Made:
    def build() -> nn.Module:
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
        )
        peft = importlib.import_module("peft")
        found: nn.Module = peft.get_peft_model(
            transformers.LlamaForCausalLM(config),
            getattr(peft, method)(task_type="CAUSAL_LM", **options),
        )
        return found

    return build, lambda: ((), {"input_ids": torch.randint(0, 50, (2, 9))})


def _x_transformer(**options: Any) -> Made:
    def build() -> nn.Module:
        library = importlib.import_module("x_transformers")
        layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        found: nn.Module = library.TransformerWrapper(
            num_tokens=50, max_seq_len=16, attn_layers=layers
        )
        return found

    return build, lambda: ((torch.randint(0, 50, (2, 9)),), {})


_LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
LIBRARIES: dict[str, tuple[str, dict[str, Made]]] = {
    "timm": (
        "image models",
        {
            "vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=32, depth=2),
            "deit_tiny_patch16_224": _timm("deit_tiny_patch16_224", img_size=32, depth=2),
            "eva02_tiny_patch14_224": _timm("eva02_tiny_patch14_224", 28, img_size=28, depth=2),
            "convnext_atto": _timm("convnext_atto", depths=(1, 1, 1, 1)),
            "resnet18": _timm("resnet18"),
            "mobilenetv3_small_050": _timm("mobilenetv3_small_050"),
            "regnetx_002": _timm("regnetx_002", 64),
        },
    ),
    "torchvision": (
        "classifiers",
        {
            "resnet18": _torchvision("resnet18"),
            "squeezenet1_1": _torchvision("squeezenet1_1"),
            "shufflenet_v2_x0_5": _torchvision("shufflenet_v2_x0_5"),
            "mnasnet0_5": _torchvision("mnasnet0_5"),
        },
    ),
    "segmentation_models_pytorch": (
        "segmentation",
        {name: _segmentation(name) for name in ("Unet", "FPN", "DeepLabV3Plus")},
    ),
    "diffusers": (
        "denoisers",
        {
            "UNet2DModel": _diffusers(
                "UNet2DModel",
                partial(_noisy, 3),
                **_BLOCKS,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                attention_head_dim=4,
            ),
            "UNet2DConditionModel": _diffusers(
                "UNet2DConditionModel",
                partial(_noisy, 4, text=24),
                **_BLOCKS,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                cross_attention_dim=24,
                attention_head_dim=4,
            ),
            "DiTTransformer2DModel": _diffusers(
                "DiTTransformer2DModel",
                partial(_noisy, 4, classes=True),
                num_attention_heads=2,
                attention_head_dim=8,
                num_layers=2,
                sample_size=16,
                num_embeds_ada_norm=10,
                norm_num_groups=4,
            ),
            "SD3Transformer2DModel": _diffusers(
                "SD3Transformer2DModel",
                partial(_noisy, 4, text=32, pooled=64),
                sample_size=16,
                patch_size=2,
                in_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pooled_projection_dim=64,
                out_channels=4,
            ),
        },
    ),
    "peft": (
        "adapters on a Llama",
        {
            "LoraConfig": _adapted("LoraConfig", **_LORA),
            "LoraConfig-dora": _adapted("LoraConfig", **_LORA, use_dora=True),
            "IA3Config": _adapted("IA3Config"),
            "PromptTuningConfig": _adapted("PromptTuningConfig", num_virtual_tokens=4),
        },
    ),
    "x_transformers": (
        "decoders by options",
        {
            "plain": _x_transformer(),
            "rotary": _x_transformer(rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
            "alibi": _x_transformer(alibi_pos_bias=True, attn_kv_heads=2),
        },
    ),
}


def subjects() -> Iterator[tuple[str, str, Subject]]:
    """(library, family, subject)"""
    for library, (family, models) in LIBRARIES.items():
        if importlib.util.find_spec(library) is not None:
            for name, (build, call) in models.items():
                yield library, family, Subject(f"{name} of {library}", build, call)
