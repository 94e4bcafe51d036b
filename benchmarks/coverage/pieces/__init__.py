"""Kinds of code that people train, each as a small program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..subject import Call, Subject
from . import attention, experts, functions, quantized


class Piece(NamedTuple):
    """A program.

    Attributes:
        about: what it is, for a reader.
        build: makes the module.
        call: makes the arguments of one microbatch.
        kept: what the loss reads of the module besides its output.
    """

    about: str
    build: Callable[[], nn.Module]
    call: Callable[[], Call] = experts.features
    kept: Callable[[Any], Any] | None = None


def _kept(model: Any) -> Any:
    return model.kept()


PIECES = {
    "mask for FlexAttention": Piece(
        "a `BlockMask` as an argument", attention.FlexModel, attention.with_causal_mask
    ),
    "mask of documents": Piece(
        "a `BlockMask` over a tensor, new for each microbatch",
        attention.FlexModel,
        attention.with_document_mask,
    ),
    "masks by name": Piece(
        "a dictionary of several", attention.FlexModel, attention.with_masks_by_name
    ),
    "packed, named tuple": Piece(
        "offsets and the longest length, as torchtitan's metadata",
        attention.PackedModel,
        attention.packed_as(attention.NamedOffsets),
    ),
    "packed, dataclass": Piece(
        "the same", attention.PackedModel, attention.packed_as(attention.Offsets)
    ),
    "packed, plain object": Piece(
        "the same", attention.PackedModel, attention.packed_as(attention.PlainOffsets)
    ),
    "batch, dataclass": Piece(
        "one object with all inputs", attention.BatchModel, attention.with_batch
    ),
    "losses on layers": Piece(
        "`self.balance = ...` in each layer, which the loss adds up",
        experts.LossOnLayers,
        kept=_kept,
    ),
    "losses in a new list": Piece(
        "`self.losses = []`, appended to, and a norm", experts.LossesInNewList, kept=_kept
    ),
    "losses in one list": Piece(
        "a list that is emptied and filled", experts.LossesInOneList, kept=_kept
    ),
    "grouped products, float32": Piece("`F.grouped_mm`", experts.Grouped),
    "grouped products, bfloat16": Piece(
        "the same", functools.partial(experts.Grouped, torch.bfloat16)
    ),
    "loop over experts": Piece("`torch.where(chosen == expert)`", experts.Looped),
    "int8 base": Piece(
        "frozen weights of a subclass, adapters trained",
        functools.partial(quantized.adapted, quantized.Int8),
    ),
    "NF4 base": Piece("QLoRA's", functools.partial(quantized.adapted, quantized.Nf4)),
    "int8 products": Piece("trained weights of a subclass", quantized.mixed),
    "scales on modules": Piece(
        "quantization that is trained for: `self.scale = ...`",
        functools.partial(quantized.trained_for, quantized.Scaled),
    ),
    "prepare_qat": Piece("torch.ao's fake quantizers", quantized.prepared),
    "attributes read and replaced": Piece(
        "the largest seen, no buffer", functools.partial(quantized.trained_for, quantized.Observed)
    ),
    "autograd in a backward": Piece(
        "a function that recomputes, by `torch.autograd.grad`", functions.Recomputed
    ),
    "autograd in a forward": Piece(
        "a loss in chunks", functions.ChunkedLoss, functions.with_targets
    ),
    "compile regions": Piece("`nested_compile_region`", functions.Regions),
    "blocks compiled in place": Piece("`block.compile()`", functions.compiled_blocks),
    "blocks in torch.compile": Piece("`torch.compile(block)`", functions.wrapped_blocks),
    "caches of first calls": Piece("as einops fills them", functions.Rearranged),
}


def subjects() -> Iterator[Subject]:
    for name, each in PIECES.items():
        yield Subject(name, each.build, each.call, kept=each.kept)
