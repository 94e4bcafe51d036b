"""torch.distributed.pipelining beside ours, where it has one of the paper's schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..pipeline import peers
from ..pipeline.contenders import GPIPE, OURS, THEIRS
from .cells import RANKS
from .settings import Settings
from .theory import BY_LABEL

NAMES = ("gpipe", "1f1b", "GPipe", "1F1B")  # ours, split; theirs, which cannot split these


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family, M and contender; taking turns in one run of a family.

    Weights are not tied here: torch's stages have no way to share a parameter.
    """
    contenders = [each for each in (GPIPE, *OURS, *THEIRS) if each.name in NAMES]
    chosen = (BY_LABEL[label] for label in settings.schedules)
    counts = sorted({each.microbatches(RANKS) for each in chosen if each.torch})
    for family in settings.families:
        overrides = {name: str(value) for name, value in settings.overrides(family).items()}
        if family != "resnet":
            overrides["tied"] = "false"
        found = peers.measure(
            f"examples.families.by_hand:{family}",
            counts,
            settings.steps,
            overrides=overrides,
            contenders=contenders,
        )
        for row in found:
            yield {
                **dataclasses.asdict(row),
                "name": f"{family}, M={row.microbatches}, {row.schedule}",
                "family": family,
                "seconds": row.seconds,
                "spread": row.spread,
            }
