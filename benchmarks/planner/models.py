"""What is cut: the four families, and two models whose layers are far from equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.families import FAMILIES, TINY
from examples.stages import seeded, stage_layers


class Subject(Protocol):
    """What is asked of ``examples.families.Family`` or of what stands beside it."""

    @property
    def loss_fn(self) -> Callable[[Any, Tensor], Tensor]: ...

    @property
    def batch_fn(self) -> Callable[[int, int], tuple[Tensor, Tensor]]: ...

    @property
    def microbatch_size(self) -> int: ...

    @property
    def build(self) -> Callable[[], nn.Module]: ...

    def example(self) -> tuple[Tensor, ...]: ...

    def cut_by_hand(self, stages: int) -> tuple[str, ...]: ...


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """A convolutional pyramid: each level has half the resolution, and 1.5 times the channels, of
    the one before, so its layers take about half the time.
    """

    width: int = 48
    levels: int = 4
    layers: int = 2
    image: int = 32
    microbatch_size: int = 16
    seed: int = 0

    def build(self) -> nn.Module:
        with seeded(self.seed, 0):
            modules: list[nn.Module] = []
            channels = 3
            for level in range(self.levels):
                for layer in range(self.layers):
                    stride = 2 if level and not layer else 1
                    wider = 4 * round(self.width * 1.5**level / 4)
                    modules.append(_Layer(channels, wider, stride))
                    channels = wider
            return nn.Sequential(*modules, _Head(channels, 10))

    def example(self) -> tuple[Tensor, ...]:
        return (self.batch_fn(0, self.microbatch_size)[0],)

    def batch_fn(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Noise: what is measured does not depend on it."""
        with seeded(self.seed, 1 + step):
            return torch.randn(size, 3, self.image, self.image), torch.randint(10, (size,))

    def loss_fn(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets)

    def cut_by_hand(self, stages: int) -> tuple[str, ...]:
        count = self.levels * self.layers
        return tuple(str(stage_layers(count, index, stages).start) for index in range(1, stages))


class _Layer(nn.Module):
    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, wider, 3, stride, 1)
        self.norm = nn.GroupNorm(4, wider)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


class _Head(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mean((2, 3)))
        return y


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to cut.

    Attributes:
        make: builds it, given settings of its family.
        tiny: settings that take no time, for tests.
        lopsided: whether equal layer counts must lose by a margin.
    """

    make: Callable[..., Subject]
    tiny: Mapping[str, object]
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    lopsided: bool = False

    def subject(self, *, tiny: bool) -> Subject:
        return self.make(**{**self.settings, **(self.tiny if tiny else {})})


CASES: dict[str, Case] = {
    **{name: Case(make, TINY[name]) for name, make in FAMILIES.items()},
    "big embedding and head": Case(
        FAMILIES["llama"], TINY["llama"], {"vocabulary": 16384}, lopsided=True
    ),
    "convolutional pyramid": Case(
        Pyramid, {"width": 8, "levels": 2, "layers": 1, "image": 8}, lopsided=True
    ),
}
