"""A LLaMA-like decoder: ordinary nn.Modules, whole or cut into pipeline stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import PipelineError
from examples.stages import seeded, stage_layers


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the decoder and of its microbatches.

    The default takes about 0.1 s per forward of a microbatch on one core of a server CPU
    when it is cut into two stages.
    """

    vocabulary: int = 256
    dim: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 6
    hidden: int = 1024
    seq: int = 256
    tied: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    microbatch_size: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise PipelineError(
                f"dim must be a multiple of 2 * heads = {2 * self.heads}, got {self.dim}"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise PipelineError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x * scale).to(x.dtype) * self.weight


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., arXiv 2104.09864) for positions 0..seq-1."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(seq), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotates queries or keys, [batch, heads, positions, head_dim]."""
        positions = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * self.cos[:positions] + turned * self.sin[:positions]).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves `heads / kv_heads` query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.group = config.heads // config.kv_heads
        kv_dim = config.kv_heads * self.head_dim
        self.query = linear(config.dim, config.dim)
        self.key = linear(config.dim, kv_dim)
        self.value = linear(config.dim, kv_dim)
        self.out = linear(config.dim, config.dim, std=residual_std(config))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        query = rotary(self.heads(self.query(x)))
        key = rotary(self.heads(self.key(x)))
        value = self.heads(self.value(x))
        if self.group > 1:
            key = key.repeat_interleave(self.group, dim=1)
            value = value.repeat_interleave(self.group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output

    def heads(self, x: Tensor) -> Tensor:
        """[batch, positions, heads * head_dim] as [batch, heads, positions, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = linear(config.dim, config.hidden)
        self.up = linear(config.dim, config.hidden)
        self.down = linear(config.hidden, config.dim, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """One decoder layer: attention, then feed-forward, each normalized before and added after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x), rotary)
        output: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return output


class Decoder(nn.Module):
    """A decoder-only language model, or the part of it that pipeline stage `index` holds.

    Layers keep their number in the whole model, so a stage's state_dict is a subset of the
    whole model's. With a tied head, the first and the last of several stages each hold a copy
    of the embedding; in one stage it is one Parameter.

    forward: byte values [batch, seq] on the first stage, else hidden states
    [batch, seq, dim]; gives logits [batch, seq, vocabulary] on the last stage, else hidden
    states.
    """

    def __init__(self, config: LlamaConfig, index: int = 0, stages: int = 1) -> None:
        super().__init__()
        numbers = stage_layers(config.layers, index, stages)
        self.rotary = Rotary(config.dim // config.heads, config.seq, config.rope_base)
        self.embedding = embedding(config) if index == 0 else None
        self.layers = nn.ModuleDict()
        for number in numbers:
            with seeded(config.seed, 2 + number):
                self.layers[str(number)] = Block(config)
        self.norm: RMSNorm | None = None
        self.head: nn.Linear | None = None
        if index == stages - 1:
            self.norm = RMSNorm(config.dim, config.norm_eps)
            with seeded(config.seed, 1):
                self.head = linear(config.dim, config.vocabulary)
            if config.tied:
                self.head.weight = (self.embedding or embedding(config)).weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.rotary)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


def residual_std(config: LlamaConfig) -> float:
    """Keeps the sum over all residual branches at unit scale (GPT-2's initialization)."""
    return 0.02 / math.sqrt(2 * config.layers)


def embedding(config: LlamaConfig) -> nn.Embedding:
    with seeded(config.seed, 0):
        layer = nn.Embedding(config.vocabulary, config.dim)
        # A tied head scores each byte against its own embedding: at 0.02 the untrained model
        # would already predict that every byte repeats.
        nn.init.normal_(layer.weight, std=0.005 if config.tied else 0.02)
    return layer


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats; logits [batch, seq, vocabulary], targets [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
