"""Keyword arguments of one microbatch: always two samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]


def tokens() -> Batch:
    """Eight tokens, predicted by the model itself: one tensor, given twice."""
    ids = torch.randint(3, 64, (2, 8))
    return {"input_ids": ids, "labels": ids}


def masked_tokens() -> Batch:
    """Eight tokens, the second sample padded from its sixth."""
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    return {**tokens(), "attention_mask": mask}


def pixels(size: int = 32) -> Batch:
    return {"pixel_values": torch.randn(2, 3, size, size, requires_grad=True)}


def labelled_pixels(size: int = 32) -> Batch:
    return {**pixels(size), "labels": torch.randint(0, 3, (2,))}


def labelled_areas() -> Batch:
    return {**pixels(), "labels": torch.randint(0, 3, (2, 32, 32))}


def pairs() -> Batch:
    """A text for every image."""
    ids = torch.randint(3, 64, (2, 8))
    ids[:, -1] = 2
    return {"input_ids": ids, **pixels(), "return_loss": True}


def patches() -> Batch:
    """A text for every image, the second image in fewer patches than there is room for."""
    ids = torch.randint(3, 64, (2, 8))
    mask = torch.tensor([[1] * 16, [1] * 12 + [0] * 4])
    values = torch.randn(2, 16, 48, requires_grad=True)
    shapes = torch.tensor([[4, 4], [3, 4]])
    return {
        "input_ids": ids,
        "pixel_values": values,
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
        "return_loss": True,
    }


def spoken(sounds: int, *shape: int, **others: Tensor) -> Batch:
    """A text that begins with places for sounds, of which ``shape`` is the spectrum."""
    ids = torch.randint(4, 64, (2, sounds + 6))
    ids[:, 1 : 1 + sounds] = 3
    features = torch.randn(2, *shape, requires_grad=True)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return {**given, "input_features": features, **others}


def waves() -> Batch:
    return {"input_values": torch.randn(2, 800)}


def spectrum(*shape: int) -> Batch:
    """A spectrum and the text that is spoken."""
    features = torch.randn(2, *shape, requires_grad=True)
    return {"input_features": features, "labels": torch.randint(3, 32, (2, 4))}


def labelled_spectrum() -> Batch:
    features = torch.randn(2, 32, 16, requires_grad=True)
    return {"input_values": features, "labels": torch.randint(0, 2, (2,))}
