"""Factories for `autosplit compare` and `autosplit inspect`: a LLaMA-like decoder on English
text, a multilayer perceptron and a residual convnet on synthetic classes. Each has its loss inside.

Their keyword settings (`--set dim=256`) are the fields of the config that each one names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import text
from examples.decoder import Decoder, LlamaConfig, next_byte_loss
from examples.stages import seeded, sequential_stage
from examples.workload import WithLoss, Workload, configure, whole

# The part of a model's seed (see `seeded`) that draws its data and none of its weights.
_DATA = 1_000_000


Example = tuple[WithLoss, tuple[Tensor, Tensor]]


def llama(**overrides: object) -> Example:
    """The decoder learns to predict the next byte of English text; settings: LlamaConfig."""
    return whole(llama_workload(**overrides))


def mlp(**overrides: object) -> Example:
    """A multilayer perceptron that learns to tell noisy vectors apart; settings: MlpConfig."""
    return whole(mlp_workload(**overrides))


def convnet(**overrides: object) -> Example:
    """A residual convnet that learns to tell noisy images apart; settings: ConvNetConfig."""
    return whole(convnet_workload(**overrides))


def llama_workload(**overrides: object) -> Workload:
    """The decoder in stages, with its text; settings: LlamaConfig."""
    config = configure(LlamaConfig, overrides)
    return Workload(
        stage_fn=functools.partial(Decoder, config),
        loss_fn=next_byte_loss,
        batch_fn=functools.partial(text.batch, seq=config.seq),
        microbatch_size=config.microbatch_size,
        shared_parameters=functools.partial(_tied_parameters, config),
    )


def _tied_parameters(config: LlamaConfig, stages: int) -> Sequence[Sequence[tuple[int, str]]]:
    if not config.tied or stages == 1:
        return ()
    return (((0, "embedding.weight"), (stages - 1, "head.weight")),)


@dataclass(frozen=True)
class MlpConfig:
    features: int = 256
    width: int = 1024
    layers: int = 8
    classes: int = 10
    microbatch_size: int = 256
    seed: int = 0


def mlp_workload(**overrides: object) -> Workload:
    """The perceptron in stages, with its vectors; settings: MlpConfig."""
    config = configure(MlpConfig, overrides)
    with seeded(config.seed, _DATA):
        prototypes = torch.randn(config.classes, config.features)
    layer = functools.partial(mlp_layer, config)
    return Workload(
        stage_fn=functools.partial(sequential_stage, layer, config.layers, config.seed),
        loss_fn=F.cross_entropy,
        batch_fn=functools.partial(noisy_prototypes, prototypes),
        microbatch_size=config.microbatch_size,
    )


def mlp_layer(config: MlpConfig, number: int) -> nn.Module:
    """Linear and GELU; the first takes the features, the last gives the classes as they are."""
    inputs = config.features if number == 0 else config.width
    if number == config.layers - 1:
        return nn.Linear(inputs, config.classes)
    return nn.Sequential(nn.Linear(inputs, config.width), nn.GELU())


@dataclass(frozen=True)
class ConvNetConfig:
    width: int = 32
    layers: int = 8
    classes: int = 10
    image: int = 32
    microbatch_size: int = 16
    seed: int = 0


def convnet_workload(**overrides: object) -> Workload:
    """The convnet, which has batch norm, in stages, with its images; settings: ConvNetConfig."""
    config = configure(ConvNetConfig, overrides)
    with seeded(config.seed, _DATA):
        coarse = torch.randn(config.classes, 3, 4, 4)
    layer = functools.partial(convnet_layer, config)
    return Workload(
        stage_fn=functools.partial(sequential_stage, layer, config.layers, config.seed),
        loss_fn=F.cross_entropy,
        batch_fn=functools.partial(
            noisy_prototypes, F.interpolate(coarse, size=(config.image, config.image))
        ),
        microbatch_size=config.microbatch_size,
    )


def convnet_layer(config: ConvNetConfig, number: int) -> nn.Module:
    """A residual block; the first also takes the image in, the last also gives the classes."""
    parts: list[nn.Module] = [ResidualBlock(config.width)]
    if number == 0:
        parts.insert(0, conv_norm(3, config.width))
    if number == config.layers - 1:
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(config.width, config.classes)]
    return nn.Sequential(*parts)


def conv_norm(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(outputs)
    )


class ResidualBlock(nn.Module):
    """Two normalized convolutions around a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = conv_norm(width, width)
        self.second = conv_norm(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


def noisy_prototypes(prototypes: Tensor, step: int, size: int) -> tuple[Tensor, Tensor]:
    """Samples [size, ...] around one prototype per class, and their classes, int64 [size]."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(len(prototypes), (size,), generator=generator)
    noise = torch.randn(size, *prototypes.shape[1:], generator=generator)
    return prototypes[classes] + 2 * noise, classes
