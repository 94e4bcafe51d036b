"""Whole models to cut, and stages run one after another by hand, as the wiring says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autosplit.planner import Partition, WholeModel
from tests.zoo import Made


@dataclass
class Case:
    """A model and its inputs."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        return tensors_of((self.args, self.kwargs))


@functools.cache
def captured(make: Callable[[], Case]) -> tuple[Case, WholeModel]:
    """A case and what was captured of it, the same for all that ask: each leaves it with whatever
    gradients, and in whatever mode, it likes.
    """
    torch.manual_seed(0)
    case = make()
    return case, WholeModel.capture(case.model, case.args, case.kwargs)


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def ids() -> Tensor:
    return torch.randint(
        0, 50, (2, 8), generator=torch.Generator(torch.get_default_device()).manual_seed(1)
    )


def llama(layers: int = 2) -> Case:
    """Tied embedding and head, a mask for every layer, and the loss in the model."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=50,
        tie_word_embeddings=True,
        use_cache=False,
    )
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    inputs = {"input_ids": ids(), "attention_mask": mask, "labels": ids()}
    return Case(transformers.LlamaForCausalLM(config), (), inputs)


def llama_of_three() -> Case:
    return llama(3)


def llama_with_hidden_states() -> Case:
    """The model returns the outputs of all layers."""
    case = llama()
    return Case(case.model, (), {**case.kwargs, "output_hidden_states": True})


class UNet(nn.Module):
    """Skips from every level down to the one up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _level(3, 4), _level(4, 8), _level(8, 8)
        self.up2, self.up1 = _level(16, 4), _level(8, 4)
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.up2(torch.cat([self.grow(self.middle(self.pool(b))), b], 1))
        return self.up1(torch.cat([self.grow(c), a], 1)), c


def _level(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1),
        nn.ReLU(inplace=True),
    )


def unet() -> Case:
    return Case(UNet(), (torch.randn(2, 3, 8, 8),))


class Mixed(nn.Module):
    """A module called twice, dropout, views, autocast, a table made in place, results of every
    kind, a parameter that only is returned and one that is not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.middle = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("hidden", torch.rand(8), persistent=False)
        self.returned = nn.Parameter(torch.rand(3))
        self.unused = nn.Parameter(torch.rand(3))
        self.constant = torch.rand(8)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> dict[str, Any]:
        table = torch.zeros(x.shape[0], 8)
        table[:, 2:] = 1
        z = self.drop(self.twice(x * self.scale * table))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.middle(z) * self.constant
        z = self.drop(self.twice(z.float() * self.hidden * table))
        if self.training:
            z = z + 1
        with torch.no_grad():
            mean = z.mean()
        left = z[:, :4]
        wide = left @ self.head.weight[:, :4].t()
        return {"y": [self.head(z), wide], "mean": mean, "x": x, "w": self.returned, "n": 3.5}


def mixed() -> Case:
    return Case(Mixed(), (torch.randn(2, 8),))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] * grad  # which no derivative gives


def _squaring() -> nn.Module:
    squares = Made(lambda _, x: Squared.apply(x))
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), squares, nn.Linear(8, 8))


class Checkpointed(nn.Module):
    """In training only, as models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_squaring() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def checkpointed() -> Case:
    return Case(Checkpointed(), (torch.randn(2, 8),))


def loss_of(result: Any) -> Tensor:
    """A number that depends on every element of a result."""
    parts = [t.float() for t in tensors_of(result) if t.requires_grad]
    weights = [torch.linspace(0.1, 1, part.numel()).view(part.shape) for part in parts]
    return torch.stack([(p * w).sum() for p, w in zip(parts, weights, strict=True)]).sum()


def run_modules(split: Partition, modules: Sequence[nn.Module], batch: Sequence[Tensor]) -> Any:
    """Run all stages; return the outputs of the last."""
    outputs: list[Any] = []
    for sources, module in zip(split.wiring.inputs, modules, strict=True):
        outputs.append(module(*(_take(s, batch, outputs) for s in sources)))
    return outputs[-1]


def _take(source: Any, batch: Sequence[Tensor], outputs: Sequence[Any]) -> Tensor:
    result = batch if source.stage is None else outputs[source.stage]
    return result[source.position].detach() if source.stage is None else result[source.position]
