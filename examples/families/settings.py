"""Sizes of the four families: the small defaults, the paper's, and tiny ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from autosplit.errors import PipelineError


@dataclass(frozen=True)
class LanguageSettings:
    """Sizes of a language model and of its microbatches.

    Attributes:
        vocabulary: tokens; the bytes of the text and, for BERT, the mask make 257.
        width: of the hidden states.
        layers: how many.
        seq: tokens in a sample.
        microbatch_size: samples in a microbatch.
        seed: of weights and example inputs.
    """

    vocabulary: int = 512
    width: int = 384
    layers: int = 4
    seq: int = 128
    microbatch_size: int = 2
    seed: int = 0


@dataclass(frozen=True)
class LlamaSettings(LanguageSettings):
    """As above; `hidden` is the feed-forward layers' width, `tied` shares embedding and head."""

    heads: int = 6
    hidden: int = 1056
    tied: bool = False


@dataclass(frozen=True)
class BertSettings(LanguageSettings):
    """As above. `tied` is BERT's own way: the head predicts with the embedding's weights."""

    heads: int = 6
    hidden: int = 1536
    dropout: float = 0.0
    tied: bool = True


@dataclass(frozen=True)
class MambaSettings(LanguageSettings):
    """As above; `state` is the size of a channel's state. The scan over the sequence is
    transformers' loop, which a captured graph holds unrolled."""

    width: int = 256
    layers: int = 4
    seq: int = 16
    microbatch_size: int = 4
    state: int = 16
    tied: bool = True


@dataclass(frozen=True)
class ResNetSettings:
    """Sizes of a residual network and of its microbatches.

    Attributes:
        depths: residual layers of each of its four resolutions, as text: "3,8,36,3".
        width: channels of the stem; the resolutions have 4, 8, 16 and 32 times as many.
        image: height and width of the images, which have three channels.
        classes: how many there are.
        microbatch_size: images in a microbatch.
        seed: of weights and example inputs.
    """

    depths: str = "2,2,2,2"
    width: int = 16
    image: int = 64
    classes: int = 10
    microbatch_size: int = 16
    seed: int = 0

    @property
    def resolutions(self) -> list[int]:
        """`depths` as numbers.

        Raises:
            PipelineError: it is no list of positive numbers.
        """
        words = [word.strip() for word in self.depths.split(",")]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise PipelineError(f"depths expects numbers like '3,8,36,3', got {self.depths!r}")
        return [int(word) for word in words]


Settings: TypeAlias = LanguageSettings | ResNetSettings

PAPER: Mapping[str, Mapping[str, object]] = {
    "llama": {
        "vocabulary": 32000,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "hidden": 11008,
        "seq": 1024,
        "microbatch_size": 1,
    },
    "bert": {
        "vocabulary": 30522,
        "width": 1024,
        "layers": 24,
        "heads": 16,
        "hidden": 4096,
        "seq": 512,
        "microbatch_size": 2,
    },
    "mamba": {
        "vocabulary": 50280,
        "width": 2048,
        "layers": 48,
        "seq": 1024,
        "microbatch_size": 2,
    },
    "resnet": {
        "depths": "3,8,36,3",
        "width": 64,
        "image": 224,
        "classes": 1000,
        "microbatch_size": 8,
    },
}
"""Settings of the paper's sizes, for each family."""

TINY: Mapping[str, Mapping[str, object]] = {
    "llama": {"width": 32, "layers": 4, "heads": 2, "hidden": 64, "seq": 16, "vocabulary": 260},
    "bert": {"width": 32, "layers": 4, "heads": 2, "hidden": 64, "seq": 16, "vocabulary": 260},
    "mamba": {"width": 16, "layers": 4, "seq": 4, "state": 4, "vocabulary": 260},
    "resnet": {"depths": "1,1,1,1", "width": 4, "image": 32, "microbatch_size": 4},
}
"""Settings that only show that something works, in milliseconds."""
