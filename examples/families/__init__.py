"""The four families of 2BP's evaluation, from transformers' configurations, nothing rewritten.

`llama`, `bert`, `mamba` and `resnet` are factories for the command line and the planner: each
returns the whole model and the arguments of one call. Their keyword settings (`--set layers=8`)
are the fields of the settings class that each one names; the defaults take about 0.1 to 0.2 s a
microbatch (forward and backward) on one core. `llama_7b`, `bert_large`, `mamba_1_4b` and
`resnet_152` have the sizes of the paper's evaluation (arXiv 2405.18047); build them on the meta
device. `FAMILIES` has what training needs besides: the loss and real data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import PipelineError
from examples import digits, text
from examples.decoder import next_byte_loss
from examples.families.models import build_bert, build_llama, build_mamba, build_resnet
from examples.families.settings import (
    PAPER,
    TINY,
    BertSettings,
    LlamaSettings,
    MambaSettings,
    ResNetSettings,
    Settings,
)
from examples.stages import seeded, stage_layers
from examples.workload import configure

__all__ = ["FAMILIES", "PAPER", "TINY", "Family", "factory", "paper_factory"]

Batch: TypeAlias = tuple[Tensor, Tensor]
Example: TypeAlias = tuple[nn.Module, tuple[Tensor]]

_INPUTS = 1  # the part of a seed, see `seeded`


@dataclass(frozen=True)
class Family:
    """A model with its loss and data.

    Attributes:
        settings: its sizes.
        build: a new model, the same weights each time.
        loss_fn: ``loss_fn(output, targets)`` gives a scalar, the mean over the microbatch.
        batch_fn: ``batch_fn(step, size)`` gives (inputs, targets) of ``size`` samples of real
            data along the first dimension, the same on every call and every rank.
        layers: names of the modules that are the model's layers, in order.
    """

    settings: Settings
    build: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Tensor], Tensor]
    batch_fn: Callable[[int, int], Batch]
    layers: tuple[str, ...]

    @property
    def microbatch_size(self) -> int:
        return self.settings.microbatch_size

    def example(self) -> tuple[Tensor]:
        """The arguments of a call with one microbatch; random, so that no data is needed."""
        settings = self.settings
        with seeded(settings.seed, _INPUTS):
            if isinstance(settings, ResNetSettings):
                return (torch.randn(settings.microbatch_size, 3, settings.image, settings.image),)
            shape = (settings.microbatch_size, settings.seq)
            return (torch.randint(settings.vocabulary, shape),)

    def cut_by_hand(self, stages: int) -> tuple[str, ...]:
        """Names of the layers that begin every stage but the first, of equal layer counts.

        Raises:
            PipelineError: fewer layers than stages.
        """
        starts = (stage_layers(len(self.layers), index, stages).start for index in range(1, stages))
        return tuple(self.layers[start] for start in starts)


def llama_family(**overrides: object) -> Family:
    """A decoder learns to predict the next byte of English text; settings: LlamaSettings."""
    settings = configure(LlamaSettings, overrides)
    return _language(settings, functools.partial(build_llama, settings), "model.layers")


def bert_family(**overrides: object) -> Family:
    """An encoder learns to restore masked bytes of English text; settings: BertSettings."""
    settings = configure(BertSettings, overrides)
    build = functools.partial(build_bert, settings)
    return _language(settings, build, "bert.encoder.layer", text.masked_batch)


def mamba_family(**overrides: object) -> Family:
    """A state-space model learns to predict the next byte of English text; settings:
    MambaSettings."""
    settings = configure(MambaSettings, overrides)
    return _language(settings, functools.partial(build_mamba, settings), "backbone.layers")


def _language(
    settings: LlamaSettings | BertSettings | MambaSettings,
    build: Callable[[], nn.Module],
    layers: str,
    batch: Callable[..., Batch] = text.batch,
) -> Family:
    """A model of text whose layers are the children of the module ``layers``."""
    return Family(
        settings,
        build,
        language_loss,
        functools.partial(batch, seq=settings.seq),
        tuple(f"{layers}.{number}" for number in range(settings.layers)),
    )


def resnet_family(**overrides: object) -> Family:
    """A residual network learns to read scikit-learn's digits; settings: ResNetSettings."""
    settings = configure(ResNetSettings, overrides)
    return Family(
        settings,
        functools.partial(build_resnet, settings),
        classification_loss,
        functools.partial(digits.batch, image=settings.image),
        tuple(
            f"resnet.encoder.stages.{resolution}.layers.{number}"
            for resolution, depth in enumerate(settings.resolutions)
            for number in range(depth)
        ),
    )


FAMILIES: Mapping[str, Callable[..., Family]] = {
    "llama": llama_family,
    "bert": bert_family,
    "mamba": mamba_family,
    "resnet": resnet_family,
}


def factory(name: str, **overrides: object) -> Example:
    """The whole model of a family and the arguments of one call.

    Raises:
        PipelineError: no such family, or no such setting of it.
    """
    if name not in FAMILIES:
        raise PipelineError(f"unknown family {name!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[name](**overrides)
    return family.build(), family.example()


def paper_factory(name: str, **overrides: object) -> Example:
    """As `factory`, at the paper's size where `overrides` say nothing else."""
    return factory(name, **{**PAPER.get(name, {}), **overrides})


def llama(**overrides: object) -> Example:
    """Settings: LlamaSettings."""
    return factory("llama", **overrides)


def llama_7b(**overrides: object) -> Example:
    """Settings: LlamaSettings, at the paper's size."""
    return paper_factory("llama", **overrides)


def bert(**overrides: object) -> Example:
    """Settings: BertSettings."""
    return factory("bert", **overrides)


def bert_large(**overrides: object) -> Example:
    """Settings: BertSettings, at the paper's size."""
    return paper_factory("bert", **overrides)


def mamba(**overrides: object) -> Example:
    """Settings: MambaSettings."""
    return factory("mamba", **overrides)


def mamba_1_4b(**overrides: object) -> Example:
    """Settings: MambaSettings, at the paper's size."""
    return paper_factory("mamba", **overrides)


def resnet(**overrides: object) -> Example:
    """Settings: ResNetSettings."""
    return factory("resnet", **overrides)


def resnet_152(**overrides: object) -> Example:
    """Settings: ResNetSettings, at the paper's size."""
    return paper_factory("resnet", **overrides)


def language_loss(output: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats where ``targets`` [batch, seq] is not negative; ``output`` is
    the model's, or its logits alone."""
    return next_byte_loss(_logits(output), targets)


def classification_loss(output: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats; ``targets`` [batch]."""
    return F.cross_entropy(_logits(output), targets)


def _logits(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits
