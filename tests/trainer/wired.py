"""Stages that are wired as a graph, and the same model run by plain autograd in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.pipeline.schedule.routes import Source, Wiring


class Mix(nn.Module):
    """Mixes its inputs into outputs; every input and parameter is used once, so that sums of
    gradients do not depend on how a model is cut. Integers (masks) scale; some outputs are such.
    """

    def __init__(self, seed: int, inputs: int, outputs: int, integers: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scales = nn.ParameterList([torch.rand(()) + 0.5 for _ in range(inputs)])
        self.shifts = nn.ParameterList([torch.randn(()) for _ in range(outputs)])
        self.integers = integers

    def forward(self, *inputs: Tensor) -> Any:
        scaled = [x * scale for x, scale in zip(inputs, self.scales, strict=True)]
        total = torch.stack([torch.zeros(scaled[0].shape), *scaled]).sum(0)
        built = [torch.tanh(total + shift) for shift in self.shifts]
        whole = [(part * 4).long() for part in built[: self.integers]] + built[self.integers :]
        return tuple(whole) if len(whole) > 1 else whole[0]


class Wired:
    """A model of ``Mix`` stages, cut as ``wiring`` says."""

    shared: Sequence[Sequence[tuple[int, str]]] = ()

    def __init__(self, wiring: Wiring, integers: Mapping[int, int] | None = None) -> None:
        self.wiring = wiring
        self.stages = wiring.stage_count
        self._integers = integers or {}

    def build(self, index: int) -> nn.Module:
        outputs = (*self.wiring.outputs, 1)[index]
        count = self._integers.get(index, 0)
        return Mix(index, len(self.wiring.inputs[index]), outputs, count)


def forward(modules: Sequence[nn.Module], wiring: Wiring, batch: Sequence[Tensor]) -> Any:
    """Run all stages; return the outputs of the last."""
    built: list[Sequence[Tensor]] = []
    for module, sources in zip(modules, wiring.inputs, strict=True):
        args = [
            batch[source.position] if source.stage is None else built[source.stage][source.position]
            for source in sources
        ]
        result = module(*args)
        built.append([result] if isinstance(result, Tensor) else result)
    return built[-1][0]


def reference(
    wired: Any, batch: Sequence[Tensor], targets: Tensor | None, microbatches: int
) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
    """Losses, and gradients of their mean by stage, of plain autograd."""
    modules = [wired.build(index) for index in range(wired.stages)]
    pieces = [item.chunk(microbatches) for item in batch]
    losses = []
    for m in range(microbatches):
        output = forward(modules, wired.wiring, [piece[m] for piece in pieces])
        loss = output if targets is None else F.mse_loss(output, targets.chunk(microbatches)[m])
        torch.autograd.backward(loss / microbatches)
        losses.append(loss.detach())
    return torch.stack(losses), {
        index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        for index, module in enumerate(modules)
    }


def differences(
    mine: Mapping[int, Mapping[str, Tensor]], expected: Mapping[int, Mapping[str, Tensor]]
) -> list[str]:
    """Which of this rank's gradients are not bit for bit the expected ones."""
    return [
        f"{index}.{name}"
        for index, grads in mine.items()
        for name in {**grads, **expected[index]}
        if name not in grads
        or name not in expected[index]
        or not torch.equal(grads[name], expected[index][name])
    ]


class Down(nn.Module):
    """The way down of a U-Net: hands on what it keeps for the way up as well."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(10 + index)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.pool = nn.Conv1d(4, 4, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.tanh(self.conv(x))
        return kept, self.pool(kept)


class Up(nn.Module):
    """The way up: joins what was kept at its level; a mask from the batch drops positions."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(20 + index)
        self.grow = nn.ConvTranspose1d(4, 4, 2, stride=2)
        self.join = nn.Conv1d(8, 4, 3, padding=1)

    def forward(self, kept: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask[..., :: mask.shape[-1] // kept.shape[-1]]
        joined = torch.cat([kept, self.grow(x)], 1)
        return torch.tanh(self.join(joined)) * mask.unsqueeze(1)


class WithLabels(Up):
    """The last stage takes labels from the batch and puts out the loss."""

    def forward(self, kept: Tensor, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(kept, x, mask), labels)


class UNet:
    """Four stages down and up; skips from 0 to 3 and from 1 to 2, masks and labels used late."""

    stages = 4
    shared: Sequence[Sequence[tuple[int, str]]] = ()
    wiring = Wiring(
        inputs=(
            (Source(None, 0),),
            (Source(0, 1),),
            (Source(1, 0), Source(1, 1), Source(None, 1)),
            (Source(0, 0), Source(2, 0), Source(None, 1), Source(None, 2)),
        ),
        outputs=(2, 2, 1),
        names=("x", "mask", "labels"),
    )

    def build(self, index: int) -> nn.Module:
        return (Down, Down, Up, WithLabels)[index](index)


def unet_batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return {
        "x": torch.randn(rows, 4, 16, generator=generator),
        "mask": torch.rand(rows, 16, generator=generator) > 0.2,
        "labels": torch.randint(4, (rows, 16), generator=generator),
    }
