"""Handwritten digits that scikit-learn carries, enlarged to images to train on.

1797 images of 8 x 8 pixels (UCI's optical recognition of handwritten digits). Nothing is
downloaded.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from autosplit.errors import PipelineError


def batch(step: int, size: int, image: int) -> tuple[Tensor, Tensor]:
    """Images for one training step, the same on every call and every rank.

    Returns:
        pixels, float32 [size, 3, image, image] with mean 0 and deviation 1 over the data, and
        the digits they show, int64 [size].

    Raises:
        PipelineError: scikit-learn is not installed.
    """
    pixels, classes = corpus()
    chosen = torch.randint(len(classes), (size,), generator=torch.Generator().manual_seed(step))
    enlarged = F.interpolate(pixels[chosen], (image, image), mode="bilinear", align_corners=False)
    return enlarged.repeat(1, 3, 1, 1), classes[chosen]


@functools.cache
def corpus() -> tuple[Tensor, Tensor]:
    """All images, [1797, 1, 8, 8], and what they show, [1797].

    Raises:
        PipelineError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise PipelineError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'autosplit[examples]'"
        ) from error
    found = load_digits()
    pixels = torch.from_numpy(found.images).float().unsqueeze(1)
    classes = torch.from_numpy(found.target).long()
    return (pixels - pixels.mean()) / pixels.std(), classes
