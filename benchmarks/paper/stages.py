"""One stage in the middle of a pipeline by itself: seconds of F, I and W, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import autosplit
from autosplit.pipeline.assembly import footprint
from examples.families import by_hand

from ..split.clock import interleave
from ..split.contenders import Contender, eager
from ..split.models import Subject
from .settings import Settings

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


def middle(family: str, settings: Settings) -> Subject:
    """The stage with the input that the one before it gives, and some output gradient."""
    workload = getattr(by_hand, family)(**settings.overrides(family))
    inputs, _ = workload.batch_fn(0, workload.microbatch_size)
    with torch.no_grad():
        x = workload.stage_fn(0, STAGES)(inputs)
        module = workload.stage_fn(1, STAGES)
        grad = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(0))
    return Subject(family, module, x, grad)
