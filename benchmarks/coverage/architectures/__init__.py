"""Hugging Face architectures from tiny configurations, with random weights."""

from __future__ import annotations

from collections.abc import Iterator

from ..subject import Subject
from .architecture import Architecture
from .language import DECODERS, MIXTURES, STATE_SPACE
from .perception import AUDIO, TEXT_AND_IMAGE, VISION
from .sequence import ENCODER_DECODERS, ENCODERS

FAMILIES: dict[str, tuple[Architecture, ...]] = {
    "decoders": DECODERS,
    "mixtures of experts": MIXTURES,
    "state space and recurrent": STATE_SPACE,
    "encoders": ENCODERS,
    "encoder-decoders": ENCODER_DECODERS,
    "vision": VISION,
    "audio": AUDIO,
    "text and image": TEXT_AND_IMAGE,
}


def subjects() -> Iterator[tuple[str, Subject]]:
    """(family, subject): every architecture in train and eval mode, and, where its embedding
    may be tied to its head, tied in both and untied in train mode.
    """
    for training, other in ((True, False), (False, False), (True, True)):
        for family, architectures in FAMILIES.items():
            for architecture in architectures:
                if architecture.can_tie or not other:
                    tied = not other if architecture.can_tie else None
                    yield family, architecture.subject(tied, training)
