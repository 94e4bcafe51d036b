"""The middle one of three stages by itself: seconds of F, I and W, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import autosplit
from autosplit.pipeline.ledger.prediction import footprint
from examples.families import FAMILIES

from ..results import Rows, table
from ..split.clock import interleave
from ..split.contenders import Contender, eager
from ..split.models import Subject
from .settings import Settings

PUBLISHED = ((18.5, 18.1, 9.3), (29.7, 29.4, 19.9))
"""Milliseconds of F, I and W of a stage on an A100 (Qi et al., 1.5B and 6.2B parameters)."""

# The second of so many has an input gradient, and neither embedding nor head.
STAGES = 3


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family, one thread."""
    torch.set_num_threads(1)
    for family in settings.families:
        subject = middle(family, settings)
        builders = eager(subject)
        contenders: dict[str, Contender] = {
            name: builders[name]() for name in ("autograd", "autosplit")
        }
        found = interleave(contenders, subject, settings.rounds)
        stage = autosplit.Stage(subject.module, [subject.x.detach().requires_grad_()])
        saved, deferred = footprint(stage)
        medians = found["autosplit"].medians()
        yield {
            "name": family,
            "ms": medians,
            "backward_ms": found["autograd"].medians()["I"],
            "saved": saved,
            "deferred": deferred,
        }


class HasOverrides(Protocol):
    """Settings of the families."""

    def overrides(self, family: str) -> Mapping[str, object]:
        """Settings of a family that differ from its defaults."""


def middle(family: str, settings: HasOverrides) -> Subject:
    """The stage with the input that the one before it gives, and some output gradient."""
    subject = FAMILIES[family](**settings.overrides(family))
    inputs, _ = subject.batch_fn(0, subject.microbatch_size)
    cuts = subject.cut_by_hand(STAGES)  # behind whole layers, where one tensor goes on
    plan = autosplit.partition(subject.build(), inputs, cut_at=cuts, costs="estimate")
    with torch.no_grad():
        (x,) = plan.build(0)(inputs)
        module = Single(plan.build(1))
        grad = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(0))
    return Subject(family, module, x, grad)


class Single(nn.Module):
    """A stage that passes on one tensor, as the layers of these families do, without its tuple."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        (y,) = self.stage(x)
        return y


def render(rows: Rows) -> str:
    """A row for each family."""
    cells = [
        [
            row["name"],
            *(f"{row['ms'][kind]:.1f}" for kind in "FIW"),
            _shares(row["ms"]),
            f"{row['ms']['W'] / row['ms']['F']:.2f}",
            f"{(row['ms']['I'] + row['ms']['W']) / row['backward_ms']:.3f}",
            f"{row['deferred'] / row['saved']:.2f}",
        ]
        for row in rows
    ]
    published = "; ".join(_shares(dict(zip("FIW", each, strict=True))) for each in PUBLISHED)
    headers = ["family", "F ms", "I ms", "W ms", "shares", "W / F", "(I + W) / backward"]
    return f"{table([*headers, 'deferred / saved'], cells)}\n\nOn A100s (Qi et al.): {published}."


def _shares(ms: Mapping[str, float]) -> str:
    total = sum(ms[kind] for kind in "FIW")
    return " : ".join(f"{ms[kind] / total:.0%}" for kind in "FIW")
