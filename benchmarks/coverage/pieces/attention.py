"""Arguments that are objects: masks of FlexAttention, offsets of sequences, whole batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from ..subject import Call

WORDS, WIDTH, HEADS, BATCH, LENGTH = 31, 16, 2, 4, 16


# torch refuses FlexAttention's backward on CPUs, though it is there: products of matrices.
vars(flex)["_validate_device"] = lambda *_: None


class Block(nn.Module):
    """A layer of a language model; how it attends is said by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(*heads).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A language model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def run(self, tokens: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        found: Tensor = self.head(x)
        return found


class FlexModel(Model):
    def forward(self, tokens: Tensor, attention_masks: Any) -> Tensor:
        mask = attention_masks["flex"] if isinstance(attention_masks, dict) else attention_masks
        return self.run(tokens, lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask))


def tokens() -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH))


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def causal_mask() -> flex.BlockMask:
    size = LENGTH, LENGTH
    return flex.create_block_mask(causal, None, None, *size, device="cpu", BLOCK_SIZE=8)


def document_mask(words: Tensor) -> flex.BlockMask:
    """Within documents, of which word 0 begins a new one: a function over a tensor."""
    documents = (words % 5 == 0).cumsum(-1)

    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[batch, query] == documents[batch, key]
        return (query >= key) & same

    size = LENGTH, LENGTH
    return flex.create_block_mask(within, len(words), None, *size, device="cpu", BLOCK_SIZE=8)


def with_causal_mask() -> Call:
    return (tokens(), causal_mask()), {}


def with_document_mask() -> Call:
    words = tokens()
    return (words,), {"attention_masks": document_mask(words)}


def with_masks_by_name() -> Call:
    words = tokens()
    return (words,), {"attention_masks": {"flex": document_mask(words), "other": causal_mask()}}


class PackedModel(Model):
    """Attends within sequences that are packed one behind another, by their offsets."""

    def forward(self, tokens: Tensor, packed: Any) -> Tensor:
        places = torch.arange(tokens.numel())
        which = torch.bucketize(places, packed.offsets, right=True)
        near = places[:, None] - places < packed.longest
        mask = (which[:, None] == which) & (places[:, None] >= places) & near
        whole = tokens.reshape(1, -1)
        return self.run(
            whole, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        )


class NamedOffsets(NamedTuple):
    """As torchtitan's metadata of variable lengths."""

    offsets: Tensor
    longest: int


@dataclasses.dataclass
class Offsets:
    offsets: Tensor
    longest: int


class PlainOffsets:
    def __init__(self, offsets: Tensor, longest: int) -> None:
        self.offsets, self.longest = offsets, longest


def packed_as(kind: Callable[[Tensor, int], Any]) -> Callable[[], Call]:
    def call() -> Call:
        offsets = torch.tensor([0, 7, 7 + int(torch.randint(20, ())), BATCH * LENGTH])
        return (tokens(),), {"packed": kind(offsets, int(offsets.diff().max()))}

    return call


@dataclasses.dataclass
class Batch:
    features: Tensor
    scale: Tensor
    doubled: bool


class BatchModel(nn.Module):
    """Takes a batch as one object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, batch: Batch) -> Tensor:
        found: Tensor = self.layers(batch.features * batch.scale)
        return 2 * found if batch.doubled else found


def with_batch() -> Call:
    scale = torch.randn(BATCH, 1)
    return (Batch(torch.randn(BATCH, WIDTH), scale, bool(scale.sum() > 0)),), {}
